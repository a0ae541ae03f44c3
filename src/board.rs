//! What the controller's parts say of themselves: how each neighbour answers, and what each reconciler's last pass did.
//!
//! In memory, for people to look at; nothing decides by it. What was never asked is not here, and is shown as unknown. Names come
//! from closed sets, so it does not grow.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

/// How a neighbour answered when it was asked last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    Fine,
    /// In words, for the operator.
    Trouble(String),
}

/// What is known of one neighbour.
#[derive(Debug, Clone)]
pub struct Neighbour {
    pub standing: Standing,
    /// Since when it stands so; a trouble whose words change is still the same trouble.
    pub since: SystemTime,
    /// When it answered, or failed to, for the last time.
    pub asked: SystemTime,
    /// The last trouble, also after it has passed.
    pub last_trouble: Option<(SystemTime, String)>,
}

/// What is known of one reconciler.
#[derive(Debug, Clone)]
pub struct Pass {
    pub at: SystemTime,
    pub took: Duration,
    /// What it looked at, or why it could not.
    pub result: Result<String, String>,
    /// The last pass that changed something, and what.
    pub last_change: Option<(SystemTime, String)>,
}

/// What a pass that succeeded has to tell.
#[derive(Debug, Default)]
pub struct Told {
    /// What it looked at.
    pub saw: String,
    /// What it changed, where it changed something.
    pub changed: Option<String>,
}

/// A shared handle.
#[derive(Clone, Default)]
pub struct Board(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    neighbours: BTreeMap<&'static str, Neighbour>,
    passes: BTreeMap<&'static str, Pass>,
}

impl Board {
    pub fn neighbour(&self, name: &'static str, standing: Standing) {
        let now = SystemTime::now();
        let mut entries = self.lock();
        let before = entries.neighbours.remove(name);
        let last_trouble = match &standing {
            Standing::Trouble(why) => Some((now, why.clone())),
            Standing::Fine => before.as_ref().and_then(|b| b.last_trouble.clone()),
        };
        let same = |old: &Standing| {
            matches!((old, &standing), (Standing::Fine, Standing::Fine) | (Standing::Trouble(_), Standing::Trouble(_)))
        };
        let since = before.filter(|b| same(&b.standing)).map_or(now, |b| b.since);
        entries.neighbours.insert(name, Neighbour { standing, since, asked: now, last_trouble });
    }

    pub fn pass(&self, name: &'static str, took: Duration, told: Result<Told, String>) {
        let now = SystemTime::now();
        let mut entries = self.lock();
        let before = entries.passes.remove(name).and_then(|pass| pass.last_change);
        let (result, change) = match told {
            Ok(Told { saw, changed }) => (Ok(saw), changed.map(|what| (now, what))),
            Err(why) => (Err(why), None),
        };
        entries.passes.insert(name, Pass { at: now, took, result, last_change: change.or(before) });
    }

    /// `None`: never asked.
    pub fn of(&self, name: &str) -> Option<Neighbour> {
        self.lock().neighbours.get(name).cloned()
    }

    pub fn neighbours(&self) -> Vec<(&'static str, Neighbour)> {
        self.lock().neighbours.iter().map(|(name, known)| (*name, known.clone())).collect()
    }

    pub fn passes(&self) -> Vec<(&'static str, Pass)> {
        self.lock().passes.iter().map(|(name, known)| (*name, known.clone())).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_trouble_keeps_its_beginning_and_is_remembered_after_it() {
        let board = Board::default();
        assert!(board.of("gitea").is_none(), "never asked is unknown");
        board.neighbour("gitea", Standing::Trouble("refused".into()));
        let first = board.of("gitea").unwrap();
        board.neighbour("gitea", Standing::Trouble("no route".into()));
        let second = board.of("gitea").unwrap();
        assert_eq!(second.since, first.since);
        assert_eq!(second.standing, Standing::Trouble("no route".into()));
        board.neighbour("gitea", Standing::Fine);
        let fine = board.of("gitea").unwrap();
        assert!(fine.since >= second.asked && fine.standing == Standing::Fine);
        assert_eq!(fine.last_trouble.unwrap().1, "no route");
    }

    #[test]
    fn a_pass_that_changes_nothing_keeps_what_was_changed_last() {
        let board = Board::default();
        let told = |saw: &str, changed: Option<&str>| Ok(Told { saw: saw.into(), changed: changed.map(str::to_owned) });
        board.pass("environments", Duration::ZERO, told("1 environment", Some("removed it")));
        board.pass("environments", Duration::ZERO, told("nothing", None));
        board.pass("environments", Duration::ZERO, Err("does not answer".into()));
        let (_, pass) = board.passes().remove(0);
        assert_eq!((pass.result, pass.last_change.unwrap().1), (Err("does not answer".into()), "removed it".into()));
    }
}
