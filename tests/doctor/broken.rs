//! One thing broken at a time, at the stand-in forge.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    fs,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::StreamExt as _;
use gitea_dynamic_runner::demo::forge::ForgeConfig;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::{
    support::{am_root, controller::Controller, doctor::doctor, free_port, small_disk::SmallDisk, story},
    world::World,
};

const STORY: Duration = Duration::from_secs(100);

/// A world whose controller has run once, so that its state folder is whole.
async fn has_run() -> World {
    let mut world = World::start(2).await;
    world.controller.sigterm();
    world
}

/// Every file below a folder, with its size and when it was written.
fn listing(folder: &Path) -> Vec<(PathBuf, u64, std::time::SystemTime)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let (path, meta) = entry.map(|entry| (entry.path(), entry.metadata().unwrap())).unwrap();
        if meta.is_dir() {
            found.extend(listing(&path));
        }
        found.push((path, meta.len(), meta.modified().unwrap()));
    }
    found.sort();
    found
}

#[tokio::test]
async fn a_whole_world_needs_nothing_and_is_left_as_it_is() {
    story(STORY, async {
        let world = has_run().await;
        let before = listing(&world.controller.state());
        let said = doctor(world.controller.command()).await;
        assert_eq!((said.to_do(), said.code), (vec![], 0), "{:#?}", said.items);
        for name in [
            "settings",
            "gitea",
            "gitea.version",
            "gitea.clock",
            "gitea.token",
            "queue",
            "mirror",
            "identity",
            "state.fsync",
            "http",
        ] {
            assert_eq!(said.state(name), "fine", "{:#?}", said.item(name));
        }
        assert_eq!(listing(&world.controller.state()), before, "it changed something");
    })
    .await;
}

#[tokio::test]
async fn it_runs_beside_a_controller_and_takes_nothing_from_it() {
    story(STORY, async {
        let world = World::start(1).await;
        let job = world.push(world.counting("a"));
        world.counts("a", job).await;
        let waits = world.push(world.quick("b"));
        world.waits_with_us(waits).await;
        let said = doctor(world.controller.command()).await;
        assert_eq!((said.to_do(), said.code), (vec![], 0), "{:#?}", said.items);
        assert!(said.item("controller")["said"].as_str().unwrap().contains("is ready"), "{:#?}", said.item("controller"));
        for name in ["queue", "http", "facade"] {
            assert!(said.item(name)["said"].as_str().unwrap().contains("running controller"), "{:#?}", said.item(name));
        }
        world.gate.open();
        for job in [job, waits] {
            world.ends_green(job).await;
        }
    })
    .await;
}

/// Breaks a world, and says which item must name it, what it says, and a word of the way out.
type Break = fn(&mut Controller, &Path) -> (&'static str, &'static str, &'static str);

const BROKEN: &[Break] = &[
    |controller, _| {
        controller.set("GITEA_RUNNER_TOKEN", Some("a-canary-of-a-token".into()));
        ("gitea.token", "does not take the runner's UUID and token", "register")
    },
    |controller, _| {
        controller.set("GITEA_URL", Some(format!("http://127.0.0.1:{}", free_port())));
        ("gitea", "refused", "nothing listens there")
    },
    |controller, _| {
        controller.set("GITEA_URL", Some("http://nowhere.invalid".into()));
        ("gitea", "does not answer", "cannot be looked up")
    },
    |controller, _| {
        let url = setting(controller, "GITEA_URL");
        controller.set("GITEA_URL", Some(format!("{url}/git")));
        ("gitea", "but Gitea answers at http://127.0.0.1", "set GITEA_URL=http://127.0.0.1")
    },
    |controller, _| {
        let url = setting(controller, "GITEA_URL");
        controller.set("GITEA_URL", Some(url.replace("http://", "https://")));
        ("gitea", "does not answer", "does not speak TLS")
    },
    |controller, _| {
        controller.set("http_proxy", Some(format!("http://127.0.0.1:{}", free_port())));
        ("gitea", "refused", "a proxy is set")
    },
    |controller, _| {
        controller.set("POD_CAPACITY", Some("many".into()));
        ("settings", "POD_CAPACITY=many", "correct it")
    },
    |controller, _| {
        controller.set("RUNNER_BIN", Some("no-such-runner".into()));
        ("runner", "no official runner", "RUNNER_BIN")
    },
    |controller, base| {
        let (folder, runner) = (base.join("bin"), base.join("bin/bash"));
        fs::create_dir(&folder).unwrap();
        fs::write(&runner, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&runner, fs::Permissions::from_mode(0o755)).unwrap();
        controller.set("PATH", Some(folder.display().to_string()));
        ("git", "git was not found", "install git")
    },
    |controller, base| {
        let (folder, node) = (base.join("bin"), base.join("bin/git"));
        fs::create_dir(&folder).unwrap();
        fs::write(&node, "#!/bin/sh\necho git version 2.11.0\n").unwrap();
        fs::set_permissions(&node, fs::Permissions::from_mode(0o755)).unwrap();
        controller.set("PATH", Some(format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())));
        ("git", "git is 2.11.0", "upgrade git")
    },
    |controller, _| {
        let private = controller.state().join("private");
        fs::set_permissions(private, fs::Permissions::from_mode(0o755)).unwrap();
        ("state", "is open to others", "chmod 700")
    },
    |controller, _| {
        let key = controller.state().join("private/seal.key");
        fs::set_permissions(key, fs::Permissions::from_mode(0o644)).unwrap();
        ("state.keys", "can be read by others", "chmod 600")
    },
    |controller, _| {
        fs::write(controller.state().join("private/capability.key"), "not a key").unwrap();
        ("state.keys", "holds no key", "backup")
    },
    |controller, _| {
        fs::remove_file(controller.state().join("private/seal.key")).unwrap();
        ("state.keys", "cannot be read", "backup")
    },
    |controller, base| {
        controller.set("STATE_DIRECTORY", Some(base.join("elsewhere").display().to_string()));
        ("state", "is not there", "install -d -m 711")
    },
    |controller, _| {
        fs::write(controller.state().join("private/queue.redb"), "no database").unwrap();
        ("queue", "cannot be read", "move it away")
    },
    |controller, _| {
        layout(&controller.state().join("private/queue.redb"), 9);
        ("queue", "has the layout 9", "run that version again")
    },
    |controller, _| {
        fs::write(controller.state().join("private/ca/ca.pem"), "no certificate").unwrap();
        ("identity", "damaged or foreign", "backup")
    },
    |controller, _| {
        controller.set("TRUST_DOMAIN", Some("another.example".into()));
        ("identity", "damaged or foreign", "TRUST_DOMAIN")
    },
    |controller, _| {
        controller.set("HTTP_LISTEN", Some("192.0.2.1:9180".into()));
        ("http", "192.0.2.1:9180", "an address of this machine")
    },
];

fn setting(controller: &Controller, name: &str) -> String {
    let command = controller.command();
    let (_, value) = command.get_envs().find(|(known, _)| *known == name).unwrap();
    value.unwrap().to_str().unwrap().to_owned()
}

fn layout(file: &Path, version: u64) {
    let database = redb::Database::open(file).unwrap();
    let transaction = database.begin_write().unwrap();
    transaction.open_table(redb::TableDefinition::<u8, u64>::new("meta")).unwrap().insert(0, version).unwrap();
    transaction.commit().unwrap();
}

async fn broken(damage: Break) {
    let mut world = has_run().await;
    let base = world.base().to_owned();
    let key = fs::read_to_string(world.controller.state().join("private/seal.key")).unwrap();
    let token = setting(&world.controller, "GITEA_RUNNER_TOKEN");
    let (item, says, way_out) = damage(&mut world.controller, &base);
    let said = doctor(world.controller.command()).await;
    said.assert_to_do(item, says, way_out);
    for secret in [key.trim(), &token, "a-canary-of-a-token"] {
        assert!(!said.text.contains(secret), "a secret is shown: {}", said.text);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_broken_thing_is_named_with_its_way_out_and_no_secret_is_shown() {
    story(STORY, async {
        // A few worlds at a time: each mostly waits.
        futures::stream::iter(BROKEN).for_each_concurrent(5, |damage| broken(*damage)).await;
    })
    .await;
}

#[tokio::test]
async fn a_port_of_another_program_is_told_from_the_controllers_own() {
    story(STORY, async {
        let mut world = has_run().await;
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        world.controller.set("RUNNER_FACADE_LISTEN", Some(other.local_addr().unwrap().to_string()));
        let said = doctor(world.controller.command()).await;
        said.assert_to_do("facade", "is taken by another program", "ss -ltnp");
        assert_eq!(said.to_do(), ["facade"]);
    })
    .await;
}

#[tokio::test]
async fn a_disk_that_is_nearly_full_is_told() {
    story(STORY, async {
        let Some(disk) = SmallDisk::new("8m") else { return };
        let mut world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        world.controller.set("STATE_DIRECTORY", Some(disk.path().display().to_string()));
        let said = doctor(world.controller.command()).await;
        said.assert_to_do("state.disk", "512 MiB are needed", "free some space");
    })
    .await;
}

/// A Gitea that answers nothing but its version, with a clock of its own.
async fn another_clock(seconds: i64) -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut head = [0; 4096];
                while stream.read(&mut head).await.is_ok_and(|read| read > 0) {
                    let off = Duration::from_secs(seconds.unsigned_abs());
                    let now = std::time::SystemTime::now();
                    let date = httpdate::fmt_http_date(if seconds < 0 { now - off } else { now + off });
                    let body = r#"{"version":"1.27.3"}"#;
                    let answer = format!("HTTP/1.1 200 OK\r\nDate: {date}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test]
async fn a_clock_that_is_off_by_more_than_two_seconds_is_told_in_its_direction() {
    story(STORY, async {
        let mut world = World::prepare(1, ForgeConfig::default(), Vec::new()).await;
        for (seconds, says) in [(-3600, "ahead of"), (4, "behind")] {
            world.controller.set("GITEA_URL", Some(another_clock(seconds).await));
            doctor(world.controller.command()).await.assert_to_do("gitea.clock", says, "timesyncd");
        }
        world.controller.set("GITEA_URL", Some(another_clock(0).await));
        assert_eq!(doctor(world.controller.command()).await.state("gitea.clock"), "fine");
    })
    .await;
}

#[tokio::test]
async fn without_a_registration_the_rest_is_looked_at_all_the_same() {
    story(STORY, async {
        let mut world = has_run().await;
        world.controller.set("GITEA_RUNNER_UUID", None);
        world.controller.set("GITEA_RUNNER_TOKEN", None);
        let said = doctor(world.controller.command()).await;
        said.assert_to_do("settings", "no runner", "README.md");
        assert_eq!((said.state("gitea"), said.state("gitea.token")), ("fine", "unknown"));
        if am_root() {
            assert_eq!(said.state("isolation"), "fine");
        }
    })
    .await;
}
