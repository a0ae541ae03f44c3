//! The workflow of a task: YAML with exactly one job, as Gitea wrote it anew from the user's file.
//!
//! Only the fields that we need are read, each into a type of its own; budgets bound depth, aliases and nodes. Scalars keep their
//! source text. What Gitea's own parser tolerates (null jobs and steps, merge keys, a second document) is tolerated here.
//! Nothing is evaluated.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use serde_saphyr::{
    Spanned,
    options::{DuplicateKeyPolicy, MergeKeyPolicy, NonFiniteFloatPolicy},
};

use super::{MAX_KEY_BYTES, MAX_LABEL_BYTES, MAX_LABELS, MAX_NAME_BYTES, MAX_PAYLOAD_BYTES, cut};

/// Real workflows nest some ten levels. The parser recurses, with up to 28 KiB of stack a level in a debug build, and a thread has
/// 2 MiB: a stack that overflows would end the whole controller.
const MAX_DEPTH: usize = 32;

/// The one job of a payload.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) key: String,
    pub(super) name: Option<String>,
    pub(super) labels: Vec<String>,
    pub(super) uses: Option<String>,
    pub(super) steps: u32,
    pub(super) needs_docker: Option<String>,
}

/// Reads a payload; `Err` is for the job's log.
pub(super) fn read(payload: &[u8]) -> Result<Job, String> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(format!("The workflow of this job is larger than {} MiB. Split it up.", MAX_PAYLOAD_BYTES >> 20));
    }
    let text = std::str::from_utf8(payload).map_err(|_| "The workflow of this job is not UTF-8 text.".to_owned())?;
    let jobs = parse(text).map_err(|fault| {
        format!("The workflow of this job cannot be read: {}. Correct the workflow file.", cut(&fault.to_string(), 300))
    })?;
    let (key, job) = match (jobs.count, jobs.first) {
        (1, Some(only)) => only,
        (0, _) => return Err("The workflow that Gitea sent holds no job.".into()),
        (count, _) => return Err(format!("The workflow that Gitea sent holds {count} jobs in place of one.")),
    };
    if key.len() > MAX_KEY_BYTES {
        return Err(format!("The job's key is longer than {MAX_KEY_BYTES} bytes. Give it a shorter one."));
    }
    let job = job.unwrap_or_default();
    let labels = job.runs_on.as_ref().map(|runs_on| runs_on.value.labels(runs_on, text)).unwrap_or_default();
    if labels.len() > MAX_LABELS || labels.iter().any(|label| label.len() > MAX_LABEL_BYTES) {
        return Err(format!("`runs-on` has more than {MAX_LABELS} labels, or one of more than {MAX_LABEL_BYTES} bytes."));
    }
    Ok(Job {
        key,
        name: job.name.as_deref().filter(|name| !name.is_empty()).map(|name| cut(name, MAX_NAME_BYTES)),
        labels,
        uses: job.uses.as_deref().filter(|uses| !uses.is_empty()).map(|uses| cut(uses, MAX_KEY_BYTES)),
        steps: job.step_count(),
        needs_docker: job.needs_docker(),
    })
}

/// The first document; what follows it is not looked at, as by Gitea's and the runner's parsers.
fn parse(text: &str) -> Result<Jobs, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_total_scalar_bytes: 2 * MAX_PAYLOAD_BYTES,
            max_recorded_anchor_bytes: 2 * MAX_PAYLOAD_BYTES,
        },
        // Gitea writes aliases out, so there are next to none; nobody waits for a bomb to be counted to a million.
        alias_limits: serde_saphyr::alias_limits! { max_replay_stack_depth: MAX_DEPTH, max_total_replayed_events: 20_000 },
        // A struct refuses a field that comes twice, as Gitea and the runner do; below the fields that we read, anything goes.
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        // Gitea 1.26 expands them before it sends the payload, 1.27 refuses them.
        merge_keys: MergeKeyPolicy::Merge,
        // Keys such as `~` are texts.
        null_as_string: true,
        strict_booleans: true,
        ignore_binary_tag_for_string: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        // Errors go to the job's log, where lines of the workflow do not belong.
        with_snippet: false,
    };
    let mut first = None;
    let end = serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
        first = Option::<Workflow>::deserialize(yaml)?;
        Ok(())
    });
    match (first, end) {
        (Some(workflow), Ok(()) | Err(serde_saphyr::Error::MultipleDocuments { .. })) => Ok(workflow.jobs.unwrap_or_default()),
        (None, Ok(())) => Ok(Jobs::default()),
        (_, Err(fault)) => Err(fault),
    }
}

#[derive(Deserialize)]
struct Workflow {
    #[serde(default)]
    jobs: Option<Jobs>,
}

/// The first job and how many there are: more than one is refused, so the others need not be kept.
#[derive(Default)]
struct Jobs {
    count: usize,
    first: Option<(String, Option<JobFields>)>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "kebab-case")]
struct JobFields {
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    runs_on: Option<Spanned<RunsOn>>,
    #[serde(default)]
    uses: Option<String>,
    #[serde(default)]
    steps: Option<Vec<Option<Step>>>,
    #[serde(default)]
    container: Option<Wanted>,
    #[serde(default)]
    services: Option<Wanted>,
}

#[derive(Deserialize)]
struct Step {
    #[serde(default)]
    uses: Option<String>,
}

impl JobFields {
    fn real_steps(&self) -> impl Iterator<Item = &Step> {
        self.steps.iter().flatten().flatten()
    }

    fn step_count(&self) -> u32 {
        u32::try_from(self.real_steps().count()).unwrap_or(u32::MAX)
    }

    fn needs_docker(&self) -> Option<String> {
        if self.container.as_ref().is_some_and(|container| container.0) {
            return Some("`container:`".into());
        }
        if self.services.as_ref().is_some_and(|services| services.0) {
            return Some("`services:`".into());
        }
        let uses = self.real_steps().filter_map(|step| step.uses.as_deref());
        let mut docker = uses.filter(|uses| uses.get(..9).is_some_and(|scheme| scheme.eq_ignore_ascii_case("docker://")));
        docker.next().map(|uses| format!("`uses: {}`", cut(uses, 200)))
    }
}

/// `runs-on` in any of its forms. Gitea ≤ 1.27 flattens the mapping itself: labels first, then the group.
enum RunsOn {
    Text(String),
    /// A plain scalar that YAML takes for a number or a boolean: its source text is the label.
    Typed,
    List(Vec<Option<String>>),
    Group {
        group: Option<String>,
        labels: Option<Box<Spanned<RunsOn>>>,
    },
}

/// A field of which only counts whether anything is in it.
struct Wanted(bool);

impl RunsOn {
    fn labels(&self, place: &Spanned<RunsOn>, text: &str) -> Vec<String> {
        match self {
            RunsOn::Text(label) => vec![label.clone()],
            RunsOn::Typed => vec![source_text(place, text)],
            RunsOn::List(labels) => labels.iter().flatten().cloned().collect(),
            RunsOn::Group { group, labels } => {
                let labels = labels.as_ref().map(|labels| labels.value.labels(labels, text)).unwrap_or_default();
                labels.into_iter().chain(group.clone().filter(|group| !group.is_empty())).collect()
            }
        }
    }
}

fn source_text(place: &Spanned<RunsOn>, text: &str) -> String {
    let span = place.defined.span();
    let range = span.byte_offset().zip(span.byte_len()).and_then(|(start, len)| {
        let start = usize::try_from(start).ok()?;
        Some(start..start.checked_add(usize::try_from(len).ok()?)?)
    });
    range.and_then(|range| text.get(range)).unwrap_or_default().trim().to_owned()
}

impl<'de> Deserialize<'de> for Jobs {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Jobs;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`jobs` to be a mapping")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Jobs, A::Error> {
                let mut jobs = Jobs { count: 0, first: map.next_entry()? };
                jobs.count += usize::from(jobs.first.is_some());
                while jobs.first.is_some() && map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    jobs.count += 1;
                }
                Ok(jobs)
            }
        }
        yaml.deserialize_map(Reader)
    }
}

impl<'de> Deserialize<'de> for RunsOn {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = RunsOn;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`runs-on` to be a label, a list of labels, or a mapping of `group` and `labels`")
            }
            fn visit_unit<E>(self) -> Result<RunsOn, E> {
                Ok(RunsOn::List(Vec::new()))
            }
            fn visit_str<E>(self, text: &str) -> Result<RunsOn, E> {
                Ok(RunsOn::Text(text.to_owned()))
            }
            fn visit_bool<E>(self, _: bool) -> Result<RunsOn, E> {
                Ok(RunsOn::Typed)
            }
            fn visit_i64<E>(self, _: i64) -> Result<RunsOn, E> {
                Ok(RunsOn::Typed)
            }
            fn visit_u64<E>(self, _: u64) -> Result<RunsOn, E> {
                Ok(RunsOn::Typed)
            }
            fn visit_f64<E>(self, _: f64) -> Result<RunsOn, E> {
                Ok(RunsOn::Typed)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<RunsOn, A::Error> {
                let mut labels = Vec::new();
                while let Some(label) = seq.next_element()? {
                    labels.push(label);
                }
                Ok(RunsOn::List(labels))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RunsOn, A::Error> {
                let (mut group, mut labels) = (None, None);
                while let Some(key) = map.next_key::<String>()? {
                    match key.as_str() {
                        "group" => group = map.next_value()?,
                        "labels" => labels = map.next_value()?,
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(RunsOn::Group { group, labels })
            }
        }
        yaml.deserialize_any(Reader)
    }
}

impl<'de> Deserialize<'de> for Wanted {
    fn deserialize<D: Deserializer<'de>>(yaml: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Wanted;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("anything")
            }
            fn visit_unit<E>(self) -> Result<Wanted, E> {
                Ok(Wanted(false))
            }
            // An expression counts: what it will give is not known before the job runs.
            fn visit_str<E>(self, text: &str) -> Result<Wanted, E> {
                Ok(Wanted(!text.is_empty()))
            }
            fn visit_bool<E>(self, value: bool) -> Result<Wanted, E> {
                Ok(Wanted(value))
            }
            fn visit_i64<E>(self, _: i64) -> Result<Wanted, E> {
                Ok(Wanted(true))
            }
            fn visit_u64<E>(self, _: u64) -> Result<Wanted, E> {
                Ok(Wanted(true))
            }
            fn visit_f64<E>(self, _: f64) -> Result<Wanted, E> {
                Ok(Wanted(true))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Wanted, A::Error> {
                let mut wanted = false;
                while seq.next_element::<IgnoredAny>()?.is_some() {
                    wanted = true;
                }
                Ok(Wanted(wanted))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Wanted, A::Error> {
                let mut wanted = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    wanted = true;
                }
                Ok(Wanted(wanted))
            }
        }
        yaml.deserialize_any(Reader)
    }
}
