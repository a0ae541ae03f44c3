//! Puts together what is shown, from one moment of the mirror.
//!
//! Blocking, so `Source` asks it through the mirror. What the mirror cannot say now stays unknown.

use std::collections::HashMap;

use super::{
    Backend, Environment, Event, Job, JobDetails, JobList, Moment, Neighbour, Operation, Overview, Reconciler, Reconcilers,
    STALE_MS, Slot, Source, Times, Trouble,
    words::{self, Around},
};
use crate::{
    board::Pass,
    ids::{BackendKind, Lane, TaskId},
    mirror::{self, Filter, Phase, Snapshot, Sorted},
};

/// Rows of the overview's tables.
const WAITING: usize = 20;
const RUNNING: usize = 100;
const ENDED: usize = 10;
/// Events of one job, and of the page of reconcilers.
const EVENTS: usize = 200;
const OWN_EVENTS: usize = 50;
/// Of more slots no single ones are drawn.
pub(crate) const SLOTS_DRAWN: usize = 64;

/// Events that nobody asked for: a reconciler's doing.
const BY_ITSELF: [&str; 7] = ["made_again", "republished", "repaired", "rebuilt", "backend_retry", "lost", "dead"];

impl Source {
    pub(crate) async fn overview(&self) -> Overview {
        self.mirror.flush().await;
        let (this, operation) = (self.clone(), (self.operation)());
        let asked = self.mirror.ask(move |mirror| this.seen_overview(mirror, &operation)).await;
        asked.unwrap_or_else(|| self.unseen_overview(&(self.operation)()))
    }

    fn seen_overview(&self, mirror: &Snapshot, operation: &Operation) -> Result<Overview, String> {
        let now = Moment::now();
        let mut overview = self.unseen_overview(operation);
        let backends = self.backends(mirror, operation)?;
        let mut waiting = Vec::new();
        for phase in [Phase::Queued, Phase::Starting] {
            let filter = Filter { sorted: Sorted::OldestFirst, phase: Some(phase), limit: WAITING, ..Filter::default() };
            waiting.extend(mirror.jobs(&filter)?);
        }
        waiting.sort_by_key(|(task, job)| (job.received_ms, *task));
        waiting.truncate(WAITING);
        let running = Filter { sorted: Sorted::OldestFirst, phase: Some(Phase::Claimed), limit: RUNNING, ..Filter::default() };
        let mut ended = Vec::new();
        for phase in [Phase::Finished, Phase::Dead, Phase::Lost] {
            ended.extend(mirror.jobs(&Filter { phase: Some(phase), limit: ENDED, ..Filter::default() })?);
        }
        ended.sort_by_key(|(task, job)| std::cmp::Reverse((job.times.ended.unwrap_or(job.changed_ms), *task)));
        ended.truncate(ENDED);
        let context = Context { source: self, operation, backends: &backends, now };
        overview.waiting = Some(context.jobs_in_order(&waiting));
        overview.running = Some(context.jobs_in_order(&mirror.jobs(&running)?));
        overview.ended = Some(context.jobs_in_order(&ended));
        overview.sentence = words::sentence(operation, &backends, now);
        overview.backends = backends;
        (overview.as_of, overview.stale) = self.stamp(now);
        Ok(overview)
    }

    /// Everything that does not come from the mirror.
    fn unseen_overview(&self, operation: &Operation) -> Overview {
        let now = Moment::now();
        let backends: Vec<_> = self.kinds().map(|kind| self.unseen_backend(kind, operation)).collect();
        let (as_of, stale) = self.stamp(now);
        Overview {
            version: self.about.version.into(),
            instance: self.about.instance.as_str().into(),
            as_of,
            stale,
            ready: operation.reasons.is_empty(),
            reasons: operation.reasons.clone(),
            sentence: words::sentence(operation, &backends, now),
            fetching: operation.fetching.clone(),
            draining_since: operation.draining_since.map(Moment::from),
            backends,
            waiting: None,
            running: None,
            ended: None,
            neighbours: self.neighbours(operation),
            backlog: operation.backlog.clone(),
        }
    }

    /// Of which moment the mirror is, and whether that is too long ago.
    pub(crate) fn stamp(&self, now: Moment) -> (Option<Moment>, bool) {
        let age = self.mirror.age().map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
        (age.map(|age| Moment(now.0.saturating_sub(age))), age.is_none_or(|age| age > STALE_MS))
    }

    fn kinds(&self) -> impl Iterator<Item = BackendKind> {
        BackendKind::ALL.into_iter().filter(|kind| self.capacity.contains_key(kind))
    }

    pub(crate) fn neighbour(&self, name: &'static str) -> Neighbour {
        let kind = self.about.kinds.get(name).map_or("", String::as_str);
        Neighbour::of(name, kind, self.board.of(name))
    }

    fn neighbours(&self, operation: &Operation) -> Vec<Neighbour> {
        let mut all = vec![self.neighbour("gitea"), self.neighbour("queue")];
        all.extend(self.kinds().map(|kind| self.neighbour(kind.as_str())));
        all.push(self.neighbour("identity"));
        let mut leader = self.neighbour("leader");
        leader.state = if operation.leads { "fine" } else { "unknown" };
        all.push(leader);
        all
    }

    fn unseen_backend(&self, kind: BackendKind, operation: &Operation) -> Backend {
        let label = match kind {
            BackendKind::Pod => "pod",
            BackendKind::Vm => &self.about.vm_label,
        };
        Backend {
            backend: kind.as_str().into(),
            limit: self.capacity.get(&kind).copied().unwrap_or(0),
            used: None,
            free: None,
            running: None,
            starting: None,
            waiting: None,
            oldest_waiting: None,
            label_withdrawn: operation.declared.as_ref().map(|declared| !declared.iter().any(|l| l == label)),
            slots: None,
            standing: self.neighbour(kind.as_str()),
        }
    }

    fn backends(&self, mirror: &Snapshot, operation: &Operation) -> Result<Vec<Backend>, String> {
        let held = mirror.slots()?;
        let mut all = Vec::new();
        for kind in self.kinds() {
            let (lane, mut backend) = (kind.lane(), self.unseen_backend(kind, operation));
            let down = backend.standing.state == "trouble";
            let mut slots = Vec::new();
            for (_, _, slot) in held.iter().filter(|(l, ..)| *l == lane) {
                let state = match mirror.job(TaskId(slot.task))?.map(|job| job.phase) {
                    Some(Phase::Queued | Phase::Starting) | None => "starting",
                    Some(Phase::Claimed) => "running",
                    Some(_) => "leaving",
                };
                slots.push(Slot { state, task: Some(slot.task) });
            }
            let (used, free) = (slots.len(), backend.limit.saturating_sub(slots.len()));
            let empty = Slot { state: if down { "unavailable" } else { "free" }, task: None };
            slots.extend(std::iter::repeat_n(empty, free));
            (backend.used, backend.free, backend.slots) = (Some(used), Some(free), Some(slots));
            (backend.waiting, backend.starting) =
                (Some(mirror.count(lane, Phase::Queued)?), Some(mirror.count(lane, Phase::Starting)?));
            backend.running = Some(mirror.count(lane, Phase::Claimed)?);
            backend.oldest_waiting = mirror.oldest(lane, Phase::Queued)?.map(Moment);
            all.push(backend);
        }
        Ok(all)
    }

    /// `None`: the mirror does not answer.
    pub(crate) async fn jobs(&self, filter: Filter) -> Option<JobList> {
        self.mirror.flush().await;
        let (this, operation) = (self.clone(), (self.operation)());
        let limit = filter.limit;
        let ask = move |mirror: &Snapshot| {
            let backends = this.backends(mirror, &operation)?;
            let context = Context { source: &this, operation: &operation, backends: &backends, now: Moment::now() };
            let found = mirror.jobs(&Filter { limit: limit + 1, ..filter.clone() })?;
            let next = found.get(limit).and(found.get(limit.saturating_sub(1)));
            let next = next.map(|(task, job)| format!("{}-{task}", job.received_ms));
            let waiting: Vec<_> = found.iter().filter(|(_, job)| job.phase == Phase::Queued).cloned().collect();
            let before = mirror.before(&waiting)?;
            let place = |task: &TaskId| before.get(task).copied().unwrap_or(0);
            let jobs = found.iter().take(limit).map(|(task, job)| context.job(*task, job, place(task))).collect();
            Ok(JobList { jobs, next })
        };
        self.mirror.ask(ask).await
    }

    /// Outer `None`: the mirror does not answer. Inner: there is no such job.
    pub(crate) async fn job(&self, task: TaskId) -> Option<Option<JobDetails>> {
        self.mirror.flush().await;
        let (this, operation) = (self.clone(), (self.operation)());
        let ask = move |mirror: &Snapshot| {
            let Some(job) = mirror.job(task)? else { return Ok(None) };
            let waits = [(task, job.clone())];
            let waits = if job.phase == Phase::Queued { &waits[..] } else { &[] };
            let before = mirror.before(waits)?.get(&task).copied().unwrap_or(0);
            let backends = this.backends(mirror, &operation)?;
            let context = Context { source: &this, operation: &operation, backends: &backends, now: Moment::now() };
            let events = mirror.events(Some(task), EVENTS)?.into_iter().map(event).collect();
            Ok(Some(JobDetails { job: context.job(task, &job, before), events }))
        };
        self.mirror.ask(ask).await
    }

    pub(crate) async fn environments(&self) -> Option<Vec<Environment>> {
        self.mirror.flush().await;
        let this = self.clone();
        let ask = move |mirror: &Snapshot| {
            let mut all = Vec::new();
            for (lane, _, slot) in mirror.slots()? {
                let task = TaskId(slot.task);
                let Some(job) = mirror.job(task)? else { continue };
                let Some(environment) = &job.environment else { continue };
                all.push(Environment {
                    environment: environment.clone(),
                    backend: lane.as_str().into(),
                    task: task.0,
                    phase: job.phase.as_str().into(),
                    created_at: job.times.created.map(Moment),
                    heard_at: this.heard_at(task),
                    repository: job.details.repository.clone(),
                });
            }
            Ok(all)
        };
        self.mirror.ask(ask).await
    }

    /// Since when the oldest waits, of each lane; `None`: the mirror does not answer.
    pub(crate) async fn oldest(&self) -> Option<HashMap<Lane, Moment>> {
        let ask = |mirror: &Snapshot| {
            let mut all = HashMap::new();
            for lane in Lane::ALL {
                if let Some(ms) = mirror.oldest(lane, Phase::Queued)? {
                    all.insert(lane, Moment(ms));
                }
            }
            Ok(all)
        };
        self.mirror.ask(ask).await
    }

    pub(crate) async fn reconcilers(&self) -> Reconcilers {
        self.mirror.flush().await;
        let ask = |mirror: &Snapshot| {
            let events = mirror.events(None, 1000)?;
            let own = events.into_iter().filter(|(_, e)| BY_ITSELF.contains(&e.kind.as_str())).take(OWN_EVENTS);
            Ok(own.map(event).collect())
        };
        let reconcilers = self.board.passes().into_iter().map(|(name, pass)| reconciler(name, pass)).collect();
        Reconcilers { reconcilers, events: self.mirror.ask(ask).await }
    }

    fn heard_at(&self, task: TaskId) -> Option<Moment> {
        let claim = self.claims.get(task.assignment())?;
        let ago = u64::try_from(claim.heard_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        Some(Moment(Moment::now().0.saturating_sub(ago)))
    }
}

fn reconciler(name: &str, pass: Pass) -> Reconciler {
    let last_change = pass.last_change.map(|(at, what)| Trouble { at: at.into(), what });
    let took_ms = u64::try_from(pass.took.as_millis()).unwrap_or(u64::MAX);
    let (ok, saw) = match pass.result {
        Ok(saw) => (true, saw),
        Err(why) => (false, why),
    };
    Reconciler { name: name.into(), last_pass: pass.at.into(), took_ms, ok, saw, last_change }
}

fn event((at, event): (u64, mirror::Event)) -> Event {
    Event { at: Moment(at), task: event.task, event: event.kind, text: event.text }
}

/// What the words of a job depend on.
struct Context<'a> {
    source: &'a Source,
    operation: &'a Operation,
    backends: &'a [Backend],
    now: Moment,
}

impl Context<'_> {
    /// Jobs in the order of their arrival, so that the place in the list is the place in the queue.
    fn jobs_in_order(&self, rows: &[(TaskId, mirror::Job)]) -> Vec<Job> {
        let mut before: HashMap<Lane, u64> = HashMap::new();
        let row = |(task, job): &(TaskId, mirror::Job)| {
            let place = before.entry(job.lane).or_default();
            let shown = self.job(*task, job, *place);
            *place += u64::from(job.phase == Phase::Queued);
            shown
        };
        rows.iter().map(row).collect()
    }

    fn job(&self, task: TaskId, job: &mirror::Job, before: u64) -> Job {
        let claim = self.source.claims.get(task.assignment());
        let backend = self.backends.iter().find(|b| b.backend == job.lane.as_str());
        let around = Around { now: self.now, operation: self.operation, backend, claim: claim.as_ref(), before };
        let details = &job.details;
        Job {
            task: task.0,
            assignment: task.assignment().to_string(),
            backend: job.lane.as_str().into(),
            phase: job.phase.as_str().into(),
            state: words::state(job).into(),
            why: words::why(job, &around),
            repository: details.repository.clone(),
            job_key: details.job_key.clone(),
            job_name: details.job_name.clone(),
            run_id: details.run_id.clone(),
            run_url: self.run_url(&details.repository, &details.run_id),
            labels: details.labels.clone(),
            steps: details.steps,
            attempts: job.attempts,
            environment: job.environment.clone(),
            result: job.result.map(|result| result.as_str().into()),
            reason: job.reason.clone(),
            rebuilt: job.rebuilt,
            received_at: Moment(job.received_ms),
            changed_at: Moment(job.changed_ms),
            heard_at: if job.phase.is_open() { self.source.heard_at(task) } else { None },
            times: times(&job.times),
        }
    }

    /// Only of names that Gitea itself allows, so that no name leads elsewhere.
    fn run_url(&self, repository: &str, run: &str) -> Option<String> {
        let plain = |text: &str| !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        let (owner, name) = repository.split_once('/')?;
        let fit = plain(owner) && plain(name) && !run.is_empty() && run.bytes().all(|b| b.is_ascii_digit());
        fit.then(|| format!("{}/{owner}/{name}/actions/runs/{run}", self.source.about.gitea_url))
    }
}

fn times(t: &mirror::Times) -> Times {
    let m = |at: Option<u64>| at.map(Moment);
    Times {
        fetched: m(t.fetched),
        durable: m(t.durable),
        slot: m(t.slot),
        created: m(t.created),
        identity: m(t.identity),
        claimed: m(t.claimed),
        first_step: m(t.first_step),
        ended: m(t.ended),
        acknowledged: m(t.acknowledged),
        gone: m(t.gone),
    }
}
