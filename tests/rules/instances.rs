//! R12: what belongs to another runner registration is not touched, and one state folder has one controller.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use gitea_dynamic_runner::{
    ids::{EnvironmentName, InstanceId, Nonce, TaskId},
    process::ProcessIdentity,
};
use serde_json::{Value, json};

use crate::{
    support::{eventually, story},
    world::{SOON, World},
};

/// The keeper of another controller's environment.
struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_every_environment_carries_its_instance_and_one_of_another_instance_is_left_alone() {
    story(Duration::from_secs(120), async {
        let mut world = World::start(1).await;
        let job = world.push(world.counting("ours"));
        world.counts("ours", job).await;
        let (ours, task) = (world.environment().await, world.task(job).await);
        let folder = world.controller.state().join("private/environments");
        let record: Value = serde_json::from_slice(&std::fs::read(folder.join(format!("{ours}.json"))).unwrap()).unwrap();
        assert_eq!(record["labels"]["ci.ddupan.top/instance"], world.instance().to_string());
        assert_eq!(ours.parse::<EnvironmentName>().unwrap().parts().unwrap().0, world.instance());
        // The same task number, for another runner registration, terminal and long over its deadline: everything to be removed for.
        let (other, nonce) = (InstanceId::of_uuid("another runner"), Nonce::random());
        let theirs = EnvironmentName::new(&other, task, &nonce).to_string();
        let mut foreign = record.clone();
        foreign["name"] = theirs.as_str().into();
        foreign["labels"]["ci.ddupan.top/instance"] = other.to_string().into();
        foreign["labels"]["ci.ddupan.top/environment"] = nonce.to_string().into();
        foreign["labels"]["ci.ddupan.top/terminal"] = "true".into();
        foreign["deadline_ms"] = 1.into();
        let keeper = Keeper(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap());
        let identity = ProcessIdentity::of(keeper.0.id()).unwrap().unwrap();
        let kept = json!({"keeper": identity, "init": null, "started": true, "cgroups": []});
        let files = [(folder.join(format!("{theirs}.json")), foreign), (folder.join(format!("{theirs}.keeper")), kept)];
        for (path, content) in &files {
            std::fs::write(path, content.to_string()).unwrap();
        }
        world.controller.kill9();
        world.controller.start_again().await;
        world.gate.open();
        world.ends_green(job).await;
        let next = world.push(world.quick("next"));
        world.ends_green(next).await;
        eventually("only theirs is left", SOON, async || (world.controller.environments() == [theirs.clone()]).then_some(()))
            .await;
        for (path, content) in &files {
            assert_eq!(std::fs::read_to_string(path).unwrap(), content.to_string(), "{}", path.display());
            std::fs::remove_file(path).unwrap();
        }
        assert!(identity.is_alive().unwrap());
        assert_eq!(world.controller.metric("capacity_slots{backend=\"pod\",state=\"used\"}").await, Some(0.0));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn r12_a_second_controller_on_the_same_state_folder_refuses_to_start() {
    story(Duration::from_secs(60), async {
        let world = World::start(1).await;
        let mut second = world.controller.command();
        second.args(["serve", "--standalone"]).envs([("HTTP_LISTEN", "127.0.0.1:0"), ("RUNNER_FACADE_LISTEN", "127.0.0.1:0")]);
        let said = tokio::task::spawn_blocking(move || second.output().unwrap()).await.unwrap();
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.status.success() && text.contains("in use"), "{}: {text}", said.status);
        let job = world.push(world.quick("undisturbed"));
        world.ends_green(job).await;
        assert_eq!(world.task(job).await, TaskId(1));
    })
    .await;
}
