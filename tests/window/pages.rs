//! What is shown of a mirror that the test fills: whole, small, harmless, and never more certain than it is.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use axum::{Router, body::Body, extract::Request};
use gitea_dynamic_runner::{
    board::{Board, Standing},
    claims::{CapabilityKey, Claims},
    drain::Drain,
    http::{
        Access, Api, Draining, Http,
        view::{About, Backlog, Operation, Source, UnknownLabels},
    },
    ids::{BackendKind, InstanceId, Lane, TaskId},
    metrics::Metrics,
    mirror::{Details, Mirror, Outcome, What, ms_of},
    queue::embedded::EmbeddedQueue,
};
use http_body_util::BodyExt as _;
use serde_json::Value;
use tower::ServiceExt as _;

use crate::support::{eventually, story};

const LIMIT: Duration = Duration::from_secs(120);
/// The page's own weight, with all that it loads.
const WEIGHT: usize = 100_000;

/// The router over a mirror that the test fills.
struct Desk {
    mirror: Mirror,
    board: Board,
    router: Router,
    _folder: tempfile::TempDir,
}

fn desk(operation: Operation) -> Desk {
    let folder = tempfile::tempdir().unwrap();
    let mirror = Mirror::open(&folder.path().join("m"), InstanceId::of_uuid("u"), Metrics::new()).unwrap();
    desk_with(mirror, operation, folder)
}

fn desk_with(mirror: Mirror, operation: Operation, folder: tempfile::TempDir) -> Desk {
    let board = Board::default();
    let claims = Claims::new(CapabilityKey::random());
    let source = Source {
        mirror: mirror.clone(),
        claims: claims.clone(),
        board: board.clone(),
        operation: Arc::new(move || operation.clone()),
        capacity: HashMap::from([(BackendKind::Pod, 4), (BackendKind::Vm, 100)]),
        about: About {
            version: "1.2.3",
            instance: InstanceId::of_uuid("u"),
            gitea_url: "https://git.example.test".into(),
            kinds: HashMap::new(),
            vm_label: "vm".into(),
            unisolated: false,
        },
    };
    let queue = Arc::new(EmbeddedQueue::open(&folder.path().join("q")).unwrap());
    let drain = Drain::open(folder.path()).unwrap();
    let draining = Draining::new(drain, claims, queue.clone(), Arc::new(|| Some(BTreeSet::new())));
    let http = Http {
        reasons: Arc::new(Vec::new),
        metrics: Metrics::new(),
        access: Access { read_token: None, admin_token: None, trust_loopback: true, hosts: Vec::new() },
        api: Api { source, queue },
        draining,
    };
    Desk { mirror, board, router: http.router(), _folder: folder }
}

/// Ready, leading, and asking.
fn working() -> Operation {
    Operation { declared: Some(vec!["self-hosted".into(), "pod".into()]), leads: true, ..Operation::default() }
}

impl Desk {
    async fn get(&self, path: &str) -> (u16, String) {
        let request = Request::get(path).header("host", "localhost").body(Body::empty()).unwrap();
        let answer = self.router.clone().oneshot(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn page(&self, path: &str) -> String {
        let (status, html) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {html}");
        html
    }

    async fn json(&self, path: &str) -> Value {
        let (status, text) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str(&text).unwrap()
    }

    fn queue(&self, task: i64, lane: Lane, name: &str) {
        let details = Box::new(Details {
            repository: "boss/app".into(),
            job_key: name.into(),
            job_name: name.into(),
            run_id: "7".into(),
            labels: vec!["self-hosted".into(), lane.as_str().into()],
            steps: 3,
            token_hash: Some([1; 32]),
        });
        let fetched_ms = ms_of(SystemTime::now()).saturating_sub(60_000) + u64::try_from(task).unwrap();
        self.mirror.note(TaskId(task), What::Queued { lane, details, fetched_ms, sealed: None });
    }
}

const PAGES: [&str; 5] = ["/", "/jobs", "/jobs/1", "/reconcilers", "/jobs?phase=queued&backend=pod&repository=boss%2Fapp"];

#[tokio::test]
async fn with_five_thousand_jobs_each_page_is_small_whole_and_quick() {
    story(LIMIT, async {
        let desk = desk(working());
        for task in 1..=2 {
            desk.queue(task, Lane::Pod, "few");
        }
        let few = Instant::now();
        let lone = desk.page("/").await.len();
        let few = few.elapsed();
        for task in 3..=5000 {
            desk.queue(task, if task % 2 == 0 { Lane::Pod } else { Lane::Vm }, &format!("job {task} {}", "x".repeat(60)));
            if task % 1000 == 0 {
                desk.mirror.flush().await;
            }
        }
        for task in 4000..=5000 {
            desk.mirror.finished(TaskId(task), Outcome::Failure, Some(&"because ".repeat(60)), None);
        }
        desk.mirror.flush().await;
        let assets = desk.page("/style.css").await.len() + desk.page("/page.js").await.len() + desk.page("/icon.svg").await.len();
        assert!(assets <= 20_000, "script and style weigh {assets} bytes");
        for path in PAGES {
            let began = Instant::now();
            let html = desk.page(path).await;
            println!(
                "{path} with 5,000 jobs: {} bytes in {:?} (overview with 2 jobs: {lone} bytes in {few:?})",
                html.len(),
                began.elapsed()
            );
            assert!(html.len() + assets <= WEIGHT, "{path} weighs {} bytes", html.len());
            assert!(
                !html.contains("style=") && !html.contains("<script>") && !html.contains("onclick"),
                "{path} has inline script or style"
            );
            for (_, rest) in
                html.match_indices("src=\"").chain(html.match_indices("href=\"")).map(|(at, m)| (at, &html[at + m.len()..]))
            {
                let to = rest.split('"').next().unwrap();
                assert!(
                    to.starts_with('/') || to.starts_with('#') || to.starts_with("https://git.example.test/"),
                    "{path} leads to {to}"
                );
            }
        }
        let overview = desk.json("/api/v1/overview").await;
        assert_eq!(overview["backends"][0]["waiting"], 2000, "{overview:#}");
        let mut page = desk.json("/api/v1/jobs?phase=queued&limit=200").await;
        let mut seen = std::collections::HashSet::new();
        loop {
            seen.extend(page["jobs"].as_array().unwrap().iter().map(|job| job["task"].as_i64().unwrap()));
            let Some(next) = page["next"].as_str().map(str::to_owned) else { break };
            page = desk.json(&format!("/api/v1/jobs?phase=queued&limit=200&after={next}")).await;
        }
        assert_eq!(seen.len(), 3999, "paging shows each waiting job once");
    })
    .await;
}

#[tokio::test]
async fn hostile_names_stay_text() {
    story(LIMIT, async {
        let desk = desk(working());
        let name = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u{202e}gnp.exe\u{1b}[2J";
        desk.queue(1, Lane::Pod, name);
        desk.queue(2, Lane::Pod, &"ẅ".repeat(300));
        desk.mirror.finished(TaskId(2), Outcome::Failure, Some("</td><script>1</script>"), None);
        desk.mirror.flush().await;
        for path in ["/", "/jobs", "/jobs/1", "/jobs/2", "/jobs?repository=%22%3E%3Cscript%3E"] {
            let html = desk.page(path).await;
            for bad in ["<script>a", "<script>1", "<img", "\u{202e}", "\u{1b}", "\"><script"] {
                assert!(!html.contains(bad), "{path} contains {bad:?}:\n{html}");
            }
        }
        let html = desk.page("/jobs/1").await;
        assert!(html.contains("&#60;script&#62;alert(1)") && html.contains("\\u{202e}gnp.exe"), "{html}");
        let live = desk.get("/live?page=http://evil.example.test/").await;
        assert_eq!(live.0, 400, "{live:?}");
    })
    .await;
}

#[tokio::test]
async fn every_waiting_job_says_why() {
    story(LIMIT, async {
        let desk = desk(working());
        for task in 1..=6 {
            desk.queue(task, Lane::Pod, "build");
        }
        desk.queue(7, Lane::Refused, "lost");
        for task in 1..=4 {
            desk.mirror.note(TaskId(task), What::Slot);
        }
        desk.mirror.note(TaskId(2), What::Created { environment: "ci-2".into() });
        let again = What::MadeAgain { environment: "ci-x".into(), reason: "image denied".into(), attempts: 1 };
        desk.queue(8, Lane::Pod, "again");
        desk.mirror.note(TaskId(8), again);
        let job = async |task: i64| desk.json(&format!("/api/v1/jobs/{task}")).await["why"].as_str().unwrap().to_owned();
        assert_eq!(job(6).await, "pool full (4 of 4 in use), 1 before it");
        assert!(job(1).await.starts_with("creating its environment"), "{}", job(1).await);
        assert!(job(2).await.starts_with("identity pending"), "{}", job(2).await);
        assert!(job(7).await.contains("no backend serves its runs-on"), "{}", job(7).await);
        assert_eq!(job(8).await, "pool full (4 of 4 in use), 2 before it; retry 2 of 3: image denied");
        desk.board.neighbour("pod", Standing::Trouble("it does not list".into()));
        assert!(job(5).await.starts_with("the pod backend has been down for 0 s: it does not list"), "{}", job(5).await);
        let html = desk.page("/").await;
        assert!(!html.contains("class=\"slot free\"") || html.contains("Slots of vm"), "{html}");
        for row in html.split("<tr>").filter(|row| row.contains("data-is=\"Why\"")) {
            assert!(!row.contains("unknown"), "{row}");
        }
    })
    .await;
}

#[tokio::test]
async fn draining_and_trouble_are_the_first_sentence() {
    story(LIMIT, async {
        let since = SystemTime::now() - Duration::from_secs(125);
        let draining = desk(Operation { draining_since: Some(since), ..working() });
        draining.queue(1, Lane::Pod, "build");
        draining.mirror.flush().await;
        let overview = draining.json("/api/v1/overview").await;
        assert_eq!(
            overview["sentence"],
            "Draining: nothing new is fetched or started. 0 running, 1 waiting for a Pod (oldest 1 min)."
        );
        let job = draining.json("/api/v1/jobs/1").await;
        assert_eq!(job["why"], "draining for 2 min: nothing new is started");

        let failing = desk(Operation { reasons: vec!["gitea: no answer for 130 s".into()], ..working() });
        let html = failing.page("/").await;
        assert!(html.contains("Gitea: no answer for 130 s. Running jobs go on; nothing new is fetched."), "{html}");
    })
    .await;
}

#[tokio::test]
async fn what_is_not_known_is_unknown_and_what_is_old_is_said_to_be_old() {
    story(LIMIT, async {
        let desk = desk(working());
        desk.queue(1, Lane::Pod, "build");
        desk.mirror.flush().await;
        assert!(desk.page("/").await.contains("1 waiting for a Pod"));
        // The copy is gone from here on; the controller goes on without it.
        desk.mirror.close().await;
        let html = desk.page("/").await;
        assert!(html.contains("What runs and what waits is unknown") && !html.contains(">0<"), "{html}");
        let overview = desk.json("/api/v1/overview").await;
        for field in ["used", "free", "running", "waiting", "slots"] {
            assert!(overview["backends"][0][field].is_null(), "{field}: {overview:#}");
        }
        assert_eq!(overview["neighbours"][0]["state"], "unknown", "Gitea was never asked");
        for path in ["/api/v1/jobs", "/api/v1/jobs/1", "/api/v1/environments"] {
            assert_eq!(desk.get(path).await.0, 503, "{path}");
        }
        assert_eq!(desk.get("/jobs/1").await.0, 503);
        let old = async || desk.get("/").await.1.contains("This is old").then_some(());
        eventually("the page says that it is old", Duration::from_secs(15), old).await;
        assert_eq!(desk.json("/api/v1/overview").await["stale"], true);

        let folder = tempfile::tempdir().unwrap();
        let blind = desk_with(Mirror::none(), working(), folder);
        assert!(blind.page("/").await.contains("Unknown of when"));
    })
    .await;
}

#[tokio::test]
async fn jobs_that_no_runner_ever_gets_are_told() {
    story(LIMIT, async {
        let labels = |all: &[&str]| all.iter().map(|l| (*l).to_owned()).collect();
        let nobodys = vec![
            UnknownLabels { labels: labels(&["Array"]), jobs: 2, example: "boss/bad".into() },
            UnknownLabels { labels: labels(&["windows"]), jobs: 1, example: "boss/win".into() },
        ];
        let backlog = Backlog { queued: Some(9), as_of: None, nobodys, trouble: None };
        let desk = desk(Operation { backlog: Some(backlog), ..working() });
        let html = desk.page("/").await;
        assert!(html.contains("9 job(s) still wait at Gitea."), "{html}");
        assert!(html.contains("Array") && html.contains("that did not become a label") && html.contains("boss/win"), "{html}");
        assert!(html.contains("Label withdrawn"), "vm is not declared now");
    })
    .await;
}

#[tokio::test]
async fn a_parameter_that_makes_no_sense_is_told_with_what_would() {
    story(LIMIT, async {
        let desk = desk(working());
        for (path, told) in [
            ("/api/v1/jobs?phase=waiting", "phase: one of queued, starting, claimed, finished, dead, lost"),
            ("/api/v1/jobs?backend=moon", "backend: one of pod, vm, refused"),
            ("/api/v1/jobs?limit=0", "limit: a number from 1 to 200"),
            ("/api/v1/jobs?limit=-1", "limit: a number from 1 to 200"),
            ("/api/v1/jobs?after=x", "after: give the `next` of the page before, as it came"),
            ("/api/v1/jobs?after=%2B1-2", "after: give the `next` of the page before, as it came"),
        ] {
            let (status, text) = desk.get(path).await;
            assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()["error"].as_str().unwrap()), (400, told), "{path}");
        }
        for (path, status) in
            [("/jobs?phase=waiting", 400), ("/jobs/x", 404), ("/jobs/99", 404), ("/api/v1/jobs/99", 404), ("/api/v2", 404)]
        {
            assert_eq!(desk.get(path).await.0, status, "{path}");
        }
    })
    .await;
}
