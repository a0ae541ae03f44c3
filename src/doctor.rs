//! `doctor`: looks at everything that the controller needs, and says of each whether it is fine or what to do.
//!
//! Changes nothing, here or at a neighbour, and takes no lock that a controller could meet: it runs beside one. Each probe has a
//! limit, and all run side by side. What a finding means is judged by the probes; what is printed is `cli::doctor`'s.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use serde::Serialize;

use crate::config::{Config, Mode};

mod child;
mod gitea;
mod local;
mod ports;
mod stores;
mod tools;

pub use self::child::child_main;

/// Of one group of probes.
const LIMIT: Duration = Duration::from_secs(40);

/// What was found of one thing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// `gitea.clock`; the names are in docs/operations.md.
    pub name: &'static str,
    pub state: State,
    pub said: String,
    /// The way out, or how what is unknown can be known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to_do: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Fine,
    /// Works, and is worth knowing.
    Note,
    /// Could not be found out.
    Unknown,
    /// Somebody must do something.
    Todo,
}

impl Item {
    fn fine(name: &'static str, said: impl Into<String>) -> Self {
        Self { name, state: State::Fine, said: said.into(), to_do: None }
    }

    fn note(name: &'static str, said: impl Into<String>, to_do: impl Into<String>) -> Self {
        Self { name, state: State::Note, said: said.into(), to_do: Some(to_do.into()) }
    }

    fn unknown(name: &'static str, said: impl Into<String>, to_do: impl Into<String>) -> Self {
        Self { name, state: State::Unknown, said: said.into(), to_do: Some(to_do.into()) }
    }

    fn todo(name: &'static str, said: impl Into<String>, to_do: impl Into<String>) -> Self {
        Self { name, state: State::Todo, said: said.into(), to_do: Some(to_do.into()) }
    }
}

/// What the probes look with. With faults in the settings, what could be read of them.
struct World {
    config: Config,
    private: PathBuf,
    /// The controller that runs on this state folder.
    running: Option<u32>,
}

impl World {
    fn has_url(&self) -> bool {
        let url = &self.config.gitea.url;
        url.parse::<http::Uri>().is_ok_and(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
    }
}

/// Everything, in a fixed order.
pub async fn examine(environment: BTreeMap<String, String>, mode: Mode) -> Vec<Item> {
    let (config, faults) = Config::read_with_faults(environment, mode);
    let private = config.state_directory.join("private");
    let running = stores::running(&private.join(stores::lock_of(&config.queue)));
    let world = Arc::new(World { config, private, running });
    let mut items = settings(&faults);
    let groups = tokio::join!(
        limited("gitea", gitea::probe(&world)),
        limited("queue", stores::queue(&world)),
        limited("mirror", blocking(&world, stores::mirror)),
        limited("identity", blocking(&world, stores::identity)),
        limited("state", blocking(&world, local::state)),
        limited("isolation", local::isolation(&world)),
        limited("runner", tools::probe(&world)),
        limited("http", ports::probe(&world)),
    );
    let (gitea, queue, mirror, identity, state, isolation, tools, ports) = groups;
    items.extend([gitea, queue, mirror, identity, state, isolation, tools, ports].into_iter().flatten());
    items
}

/// As `check-config` says it.
fn settings(faults: &[String]) -> Vec<Item> {
    if faults.is_empty() {
        return vec![Item::fine("settings", "all are read and fit together")];
    }
    faults.iter().map(|fault| Item::todo("settings", fault, "correct it; README.md has every setting")).collect()
}

async fn limited(name: &'static str, probe: impl Future<Output = Vec<Item>>) -> Vec<Item> {
    tokio::time::timeout(LIMIT, probe).await.unwrap_or_else(|_| {
        let said = format!("no answer within {} s", LIMIT.as_secs());
        vec![Item::unknown(
            name,
            said,
            "something there hangs (a disk or a network that is away, most likely): look at it by hand",
        )]
    })
}

/// A disk that is away blocks its thread, not the others.
async fn blocking(world: &Arc<World>, probe: impl FnOnce(&World) -> Vec<Item> + Send + 'static) -> Vec<Item> {
    let world = Arc::clone(world);
    tokio::task::spawn_blocking(move || probe(&world)).await.unwrap_or_default()
}
