//! Makes the stream, its consumers and the dead letters, for the operator: first a plan, then what it says.
//!
//! Repeating it finds everything as it is. It raises and corrects, and never lowers, deletes or replaces: what cannot be changed in place is
//! refused with the way out. It never makes a stream that was there before, because a server with a wrong key hides its streams, and
//! making one anew deletes the files of the hidden one.

use std::fmt;

use serde_json::{Value, json};

use super::{
    api::{self, ApiError, code},
    check::Accepted,
    judge::{self, Change, Finding, Rule},
    link::{Link, Role},
    names::{Names, Settings, User},
};
use crate::ids::Lane;

/// What the operator asked beside the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// A stream that is not there is made, unless it was there before.
    MakeNew,
    /// It was there, its data are lost, and an empty one is wanted.
    ReplaceLost,
}

pub struct Setup {
    pub(super) link: Link,
    pub(super) names: Names,
    replicas: u64,
}

/// One thing that is to be there.
#[derive(Debug)]
enum Step {
    Fine,
    /// The question that does it, and what it says to the operator.
    Do {
        subject: String,
        question: Value,
        says: Vec<String>,
    },
    Refused(Vec<String>),
}

/// What is there, and what would be done.
#[derive(Debug)]
pub struct Plan(Vec<(String, Step)>);

impl Plan {
    pub fn refused(&self) -> bool {
        self.0.iter().any(|(_, step)| matches!(step, Step::Refused(_)))
    }

    pub fn nothing_to_do(&self) -> bool {
        self.0.iter().all(|(_, step)| matches!(step, Step::Fine))
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, step) in &self.0 {
            let (word, lines): (&str, &[String]) = match step {
                Step::Fine => ("is as it must be", &[]),
                Step::Do { says, .. } => ("would be changed:", says),
                Step::Refused(why) => ("CANNOT be made right in place:", why),
            };
            writeln!(f, "{what} {word}")?;
            lines.iter().try_for_each(|line| writeln!(f, "  - {line}"))?;
        }
        Ok(())
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SetupError(pub String);

pub(super) fn failed(what: &str) -> impl FnOnce(ApiError) -> SetupError + '_ {
    move |error| SetupError(format!("{what}: {error}"))
}

impl Setup {
    /// Connects as the administrator.
    pub async fn connect(settings: &Settings, admin: &User, replicas: u64) -> Result<Self, SetupError> {
        let link = Link::open(settings, admin, Role::Admin).await.map_err(SetupError)?;
        if !link.up_within(std::time::Duration::from_secs(5)).await {
            return Err(SetupError(link.why_down().await));
        }
        Ok(Self { link, names: settings.names.clone(), replicas })
    }

    /// Looks, and changes nothing. `known`: the stream that the controller of this state folder has known.
    pub async fn plan(&self, known: Option<&Accepted>, missing: Missing) -> Result<Plan, SetupError> {
        let (names, mut steps) = (&self.names, Vec::new());
        let raw = self.config_of(&format!("STREAM.INFO.{}", names.stream), code::STREAM_NOT_FOUND).await?;
        let is_new = raw.is_none();
        let stream = match raw {
            None if known.is_some_and(|known| known.stream == names.stream) && missing == Missing::MakeNew => {
                Step::Refused(vec![
                    "it was there before and is not now. A server that is given a wrong key for its encryption hides its streams, and making one \
                     anew would delete the hidden one's files: look at the server's log and data first. If the data are lost for good, \
                     `nats-setup --yes --replace-lost` makes an empty one"
                        .into(),
                ])
            }
            None => self.create_stream(&names.stream, judge::stream_rules(names)),
            Some(config) => self.change_stream(config).await?,
        };
        steps.push((format!("stream {}", names.stream), stream));
        for lane in Lane::ALL {
            let subject = format!("CONSUMER.INFO.{}.{lane}", names.stream);
            let config = if is_new { None } else { self.config_of(&subject, code::CONSUMER_NOT_FOUND).await? };
            steps.push((format!("consumer {lane} of {}", names.stream), self.consumer(lane, config)));
        }
        let dead = names.dead_stream();
        let step = match self.config_of(&format!("STREAM.INFO.{dead}"), code::STREAM_NOT_FOUND).await? {
            None => self.create_stream(&dead, judge::dead_rules(names)),
            Some(config) => changed(&config, &judge::dead_rules(names), |config| (format!("STREAM.UPDATE.{dead}"), config)),
        };
        steps.push((format!("stream {dead}"), step));
        Ok(Plan(steps))
    }

    /// Does what the plan says; each step may be repeated.
    pub async fn carry_out(&self, plan: &Plan) -> Result<(), SetupError> {
        for (what, step) in &plan.0 {
            if let Step::Do { subject, question, .. } = step {
                let _: Value = api::ask(&self.link, subject.clone(), question).await.map_err(failed(what))?;
            }
        }
        Ok(())
    }

    /// The stream for dead letters, made where there is none.
    pub async fn ensure_dead_letters(&self) -> Result<(), SetupError> {
        let dead = self.names.dead_stream();
        if self.config_of(&format!("STREAM.INFO.{dead}"), code::STREAM_NOT_FOUND).await?.is_none()
            && let Step::Do { subject, question, .. } = self.create_stream(&dead, judge::dead_rules(&self.names))
        {
            let _: Value = api::ask(&self.link, subject, &question).await.map_err(failed("make the stream for dead letters"))?;
        }
        Ok(())
    }

    /// The stream as it is now.
    pub async fn stream(&self) -> Result<Accepted, SetupError> {
        let info = api::stream_info(&self.link, &self.names.stream).await.map_err(failed("look at the stream"))?;
        Ok(Accepted { stream: self.names.stream.clone(), created: super::check::created_ns(&info) })
    }

    /// `None`: there is none.
    pub(super) async fn config_of(&self, subject: &str, absent: u64) -> Result<Option<Value>, SetupError> {
        match api::ask::<Value>(&self.link, subject.to_owned(), &json!({})).await {
            Ok(info) => Ok(Some(info.get("config").cloned().unwrap_or_default())),
            Err(ApiError::Refused(code, _)) if code == absent => Ok(None),
            Err(error) => Err(SetupError(format!("ask NATS ({subject}): {error}"))),
        }
    }

    fn create_stream(&self, name: &str, rules: Vec<Rule>) -> Step {
        let mut config = judge::wanted(&rules);
        config.insert("name".into(), json!(name));
        config.insert("num_replicas".into(), json!(self.replicas));
        let says =
            config.iter().filter(|(key, _)| *key != "name").map(|(key, value)| format!("{key}: {value}")).collect::<Vec<_>>();
        let says = vec![format!("made new, with {}", says.join(", "))];
        Step::Do { subject: format!("STREAM.CREATE.{name}"), question: Value::Object(config), says }
    }

    async fn change_stream(&self, config: Value) -> Result<Step, SetupError> {
        let names = &self.names;
        if judge::is_flat(&config, names) || self.count_flat().await? > 0 {
            return Ok(Step::Refused(vec![
                "it has the old layout, in which all assignments of a backend share one subject: stop what publishes to it, then run \
                 `nats-setup --migrate`"
                    .into(),
            ]));
        }
        let rules = judge::stream_rules(names);
        let step = changed(&config, &rules, |config| (format!("STREAM.UPDATE.{}", names.stream), config));
        let limits = judge::judge(&config, &rules).iter().any(|finding| finding.rule.key == "max_msgs_per_subject");
        if !matches!(step, Step::Do { .. }) || !limits {
            return Ok(step);
        }
        // Lowering this to 1 deletes all but the last message of each subject.
        let subjects =
            api::subjects(&self.link, &names.stream, &names.all()).await.map_err(failed("list the stream's subjects"))?;
        let doubled: Vec<_> =
            subjects.iter().filter(|(_, messages)| **messages > 1).map(|(subject, _)| subject.clone()).collect();
        if doubled.is_empty() {
            return Ok(step);
        }
        Ok(Step::Refused(vec![format!(
            "{} hold more than one message, and would lose all but one: let the controller that it belongs to empty them first",
            doubled.join(", ")
        )]))
    }

    fn consumer(&self, lane: Lane, config: Option<Value>) -> Step {
        let (stream, rules) = (&self.names.stream, judge::consumer_rules(&self.names, lane));
        let question = |action: &str, config: Value| {
            let subject = format!("CONSUMER.DURABLE.CREATE.{stream}.{lane}");
            (subject, json!({ "stream_name": stream, "config": config, "action": action }))
        };
        match config {
            Some(config) => changed(&config, &rules, |config| question("update", config)),
            None => {
                let config = judge::wanted(&rules);
                let says = vec![format!("made new, taking {}", self.names.of_lane(lane))];
                let (subject, question) = question("create", Value::Object(config));
                Step::Do { subject, question, says }
            }
        }
    }
}

/// What to do about a configuration: nothing, a change of the fields that are wrong, or a refusal.
fn changed(config: &Value, rules: &[Rule], question: impl FnOnce(Value) -> (String, Value)) -> Step {
    let findings = judge::judge(config, rules);
    if findings.is_empty() {
        return Step::Fine;
    }
    let fixed: Vec<_> = findings.iter().filter(|finding| finding.rule.change == Change::Never).collect();
    if !fixed.is_empty() {
        let way = "the server does not let that be changed: stop the controllers, move the messages into a stream made by this command under \
                   another NATS_STREAM and NATS_SUBJECT_BASE, or let them be worked off, then delete this one (docs/nats.md)";
        let mut why: Vec<_> = fixed.into_iter().map(Finding::text).collect();
        why.push(way.into());
        return Step::Refused(why);
    }
    let mut config = config.clone();
    for Finding { rule, found } in &findings {
        config[rule.key] = match (&rule.wanted, found) {
            // Other subjects stay.
            (Value::Array(wanted), Value::Array(found)) => {
                json!(found.iter().chain(wanted.iter().filter(|one| !found.contains(one))).collect::<Vec<_>>())
            }
            (wanted, _) => wanted.clone(),
        };
    }
    let says = findings.iter().map(|finding| format!("{} becomes {}", finding.text(), config[finding.rule.key])).collect();
    let (subject, question) = question(config);
    Step::Do { subject, question, says }
}
