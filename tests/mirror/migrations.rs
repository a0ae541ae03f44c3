//! Every layout that ever was is brought to the present one: a sample of each lies in `migrations/`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};

use gitea_dynamic_runner::{
    ids::{InstanceId, Lane, TaskId},
    metrics::Metrics,
    mirror::{Details, Mirror, Outcome, Phase, Reader, SCHEMA, What},
};

/// Of the runner that the samples were made for.
const UUID: &str = "sample";

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("migrations")
}

fn sample(version: u64) -> PathBuf {
    samples().join(format!("v{version}/mirror.redb"))
}

#[tokio::test]
async fn every_sample_database_is_brought_to_the_present_layout_with_all_that_is_in_it() {
    for version in 1..=SCHEMA {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("mirror.redb");
        std::fs::copy(sample(version), &path).unwrap_or_else(|e| panic!("{}: {e}", sample(version).display()));
        let mirror = Mirror::open(&path, InstanceId::of_uuid(UUID), Metrics::new()).unwrap();
        let waits = mirror.ask(|m| m.job(TaskId(3))).await.unwrap().expect("the job that waits");
        assert_eq!(
            (waits.phase, waits.lane, waits.details.repository.as_str()),
            (Phase::Queued, Lane::Vm, "boss/app"),
            "v{version}"
        );
        assert_eq!(mirror.ask(|m| m.payload(TaskId(3))).await.unwrap().unwrap(), b"sealed", "v{version}");
        let runs = mirror.ask(|m| m.job(TaskId(2))).await.unwrap().expect("the job that runs");
        assert_eq!((runs.phase, runs.environment.as_deref(), runs.attempts), (Phase::Claimed, Some("ci-2b"), 1), "v{version}");
        let finished = mirror.ask(|m| m.finished(TaskId(1))).await.unwrap().expect("the task that is over");
        assert_eq!((finished.result, finished.token_hash), (Outcome::Success, Some([7; 32])), "v{version}");
        assert!(!mirror.ask(|m| m.events(None, 10)).await.unwrap().is_empty(), "v{version}");
        mirror.close().await;
        assert!(Reader::open(&path).is_ok(), "v{version}: now of the present layout");
        let set_aside = std::fs::read_dir(folder.path())
            .unwrap()
            .filter(|e| e.as_ref().unwrap().file_name().to_str().unwrap().contains("bad"));
        assert_eq!(set_aside.count(), 0, "v{version}: it was migrated, not made anew");
    }
}

#[test]
fn each_layout_is_described() {
    let said = std::fs::read_to_string(samples().join("README.md")).unwrap();
    for version in 1..=SCHEMA {
        assert!(said.contains(&format!("## Version {version}")), "migrations/README.md describes version {version}");
    }
    let folders = std::fs::read_dir(samples()).unwrap().filter(|e| e.as_ref().unwrap().path().is_dir()).count();
    assert_eq!(u64::try_from(folders).unwrap(), SCHEMA, "a sample for each version");
}

/// Writes the sample of the present version into `MIRROR_SAMPLE`. Run once for each version, when it is made:
/// `MIRROR_SAMPLE=migrations/v2/mirror.redb cargo test --test mirror -- --ignored make_the_sample`.
#[tokio::test]
#[ignore = "makes the sample of a new version"]
async fn make_the_sample() {
    let path = PathBuf::from(std::env::var("MIRROR_SAMPLE").unwrap());
    let mirror = Mirror::open(&path, InstanceId::of_uuid(UUID), Metrics::new()).unwrap();
    for task in 1..=3 {
        let details = Details {
            repository: "boss/app".into(),
            job_key: "test".into(),
            job_name: "Test".into(),
            run_id: "12".into(),
            labels: vec!["self-hosted".into(), "vm".into()],
            steps: 2,
            token_hash: Some([7; 32]),
        };
        let what = What::Queued {
            lane: Lane::Vm,
            details: Box::new(details),
            fetched_ms: 1_700_000_000_000,
            sealed: Some(b"sealed".to_vec()),
        };
        mirror.note(TaskId(task), what);
    }
    for task in 1..=2 {
        let (first, second) = (format!("ci-{task}a"), format!("ci-{task}b"));
        mirror.note(TaskId(task), What::Slot);
        mirror.note(TaskId(task), What::Created { environment: first.clone() });
        mirror.note(TaskId(task), What::MadeAgain { environment: first, reason: "it ended".into(), attempts: 1 });
        mirror.note(TaskId(task), What::Slot);
        mirror.note(TaskId(task), What::Created { environment: second.clone() });
        mirror.note(TaskId(task), What::Claimed { environment: second });
        mirror.note(TaskId(task), What::Acknowledged);
    }
    mirror.finished(TaskId(1), Outcome::Success, None, Some([7; 32]));
    mirror.close().await;
}
