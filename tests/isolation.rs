//! What a job can reach that is not its own: nothing. The whole system as root, a job that tries, and another job that must not notice.
//!
//! The one that tries runs its attempts as plain steps, and writes into its log how each ended; beside every attempt stands one of the same
//! kind that must succeed, so that a refusal is never a fault of the attempt. What is in the other's folder and processes, the test
//! tells it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{fs, path::PathBuf, time::Duration};

use gitea_dynamic_runner::{
    demo::forge::{JobId, JobSpec, JobStatus, JobView},
    identity::Identity,
    process::{self, ProcessIdentity},
};
use support::{
    eventually,
    standin::{Environment, LIMIT, StandIn, names},
};

mod support;

/// Bash words for attempts. `probe NAME COMMAND…` says whether a command succeeded; `call PORT PATH TOKEN` and `raw PORT LINE` say a status.
const WORDS: &str = r#"
exec 2>/dev/null
probe() { name=$1; shift; if ( "$@" ) >/dev/null 2>&1; then echo "$name: done"; else echo "$name: refused"; fi; }
raw() { ( exec 3<>"/dev/tcp/127.0.0.1/$1" && printf '%s\r\nHost: 127.0.0.1\r\nX-Runner-Token: %s\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}' "$2" "$3" >&3 && read -r -t 10 _ status _ <&3 && echo "$status" ); }
call() { raw "$1" "POST $2 HTTP/1.1" "$3"; }
look() { sed -n 's/.*"'$1'":"\([^"]*\)".*/\1/p' ../.runner; }
port=$(look address); port=${port##*:}; token=$(look token)
"#;

const DECLARE: &str = "/api/actions/runner.v1.RunnerService/Declare";

/// The controller, and a job that has something to lose.
struct World {
    system: StandIn,
    victim: JobId,
    theirs: Environment,
}

fn job(key: &str, script: &str) -> JobSpec {
    JobSpec::new(key, &["self-hosted", "pod"]).run(&format!("{WORDS}{script}"))
}

impl World {
    async fn new() -> Option<Self> {
        let system = StandIn::as_root(2).await?;
        let script = "echo mine > $HOME/mine; echo ready\nuntil [ -e $HOME/go ]; do sleep 0.1; done\ncat $HOME/mine; echo whole";
        let mut spec = job("victim", script).secret("PASSWORD", "the victim's password");
        spec.env.insert("PASSWORD".into(), "${{ secrets.PASSWORD }}".into());
        let victim = system.push(spec);
        system.says(victim, "ready").await;
        let theirs = system.environment(victim);
        Some(Self { system, victim, theirs })
    }

    /// Runs the attempts as a job of its own, and answers what they said.
    async fn attempt(&self, script: &str) -> JobView {
        let id = self.system.push(job("attacker", script));
        self.system.ended(id).await
    }

    /// As [`Self::attempt`]; the rows `name: outcome`, in order.
    async fn outcomes(&self, script: &str) -> Vec<String> {
        let view = self.attempt(script).await;
        assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
        view.log
            .into_iter()
            .filter(|row| [": done", ": refused"].iter().any(|end| row.ends_with(end)) || is_status(row))
            .collect()
    }

    /// The port and the token of the victim's bridge.
    fn bridge(&self) -> (String, String) {
        let file = fs::read_to_string(self.theirs.folder.join("work/runner/.runner")).unwrap();
        let said: serde_json::Value = serde_json::from_str(&file).unwrap();
        let text = |key: &str| said[key].as_str().unwrap().to_owned();
        (text("address").rsplit(':').next().unwrap().to_owned(), text("token"))
    }

    /// The victim ends well, having noticed nothing.
    async fn end(self) {
        fs::write(self.theirs.folder.join("home/go"), "").unwrap();
        let view = self.system.ended(self.victim).await;
        assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
        assert!(view.log.iter().any(|row| row == "whole") && view.log.iter().any(|row| row == "mine"), "{:#?}", view.log);
        self.system.end().await;
    }
}

/// `name: 404`.
fn is_status(row: &str) -> bool {
    row.rsplit_once(": ").is_some_and(|(_, end)| end.len() == 3 && end.bytes().all(|byte| byte.is_ascii_digit()))
}

#[tokio::test(flavor = "multi_thread")]
async fn another_jobs_bridge_takes_no_call_without_its_token() {
    let Some(world) = World::new().await else { return };
    let (port, _) = world.bridge();
    let said = world
        .outcomes(&format!(
            r#"for method in FetchTask UpdateTask UpdateLog Declare Register; do
               echo "own token $method: $(call {port} /api/actions/runner.v1.RunnerService/$method $token)"
               echo "no token $method: $(call {port} /api/actions/runner.v1.RunnerService/$method)"
               done
               echo "own bridge: $(call $port {DECLARE} $token)""#
        ))
        .await;
    let mut expected = Vec::new();
    for method in ["FetchTask", "UpdateTask", "UpdateLog", "Declare", "Register"] {
        expected.extend([format!("own token {method}: 401"), format!("no token {method}: 401")]);
    }
    expected.push("own bridge: 200".into());
    assert_eq!(said, expected);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_jobs_workload_socket_gives_it_no_identity() {
    let Some(world) = World::new().await else { return };
    let prober = world.system.folder().join("prober");
    fs::copy(std::env::current_exe().unwrap(), &prober).unwrap();
    let probe = format!("{} the_prober_itself --exact --ignored --nocapture --test-threads=1", prober.display());
    let (socket, id) = (&world.theirs.variables["SPIFFE_ENDPOINT_SOCKET"], &world.theirs.variables["CI_SPIFFE_ID"]);
    let said = world
        .outcomes(&format!(
            "probe own env PROBE_SOCKET=$SPIFFE_ENDPOINT_SOCKET PROBE_ID=$CI_SPIFFE_ID {probe}\n\
             probe theirs env PROBE_SOCKET={socket} PROBE_ID={id} {probe}\n\
             probe connect-own env PROBE_SOCKET=$SPIFFE_ENDPOINT_SOCKET PROBE_ID={id} {probe}"
        ))
        .await;
    assert_eq!(said, ["own: done", "theirs: refused", "connect-own: refused"]);
    assert!(world.system.log().contains("refused a connection to a Workload API socket"), "the operator is told");
    world.end().await;
}

/// Not a test of its own: what a job runs to ask a Workload API socket for an identity.
#[tokio::test]
#[ignore = "a story runs it inside a job"]
async fn the_prober_itself() {
    let (Ok(socket), Ok(id)) = (std::env::var("PROBE_SOCKET"), std::env::var("PROBE_ID")) else { return };
    let trust_domain = id.split('/').nth(2).unwrap().to_owned();
    Identity::connect(&socket, &trust_domain, &id, Duration::from_secs(3)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_jobs_folder_can_neither_be_listed_nor_read_nor_written() {
    let Some(world) = World::new().await else { return };
    let folder = world.theirs.folder.display();
    let said = world
        .outcomes(&format!(
            r#"mine=${{HOME%/home}}
               echo mine > $HOME/mine
               for of in $mine {folder}; do
               probe "list" ls $of
               probe "list home" ls $of/home
               probe "read" cat $of/home/mine
               probe "read .runner" cat $of/work/runner/.runner
               probe "write" touch $of/home/forged
               probe "make" mkdir $of/forged
               probe "link" ln -s $of/home/mine $HOME/link-$RANDOM
               probe "read by link" cat $HOME/link-*
               rm -f $HOME/link-*
               done
               probe "list all" ls {folder}/..
               probe "rename" mv {folder} {folder}-moved"#
        ))
        .await;
    let mut expected: Vec<&str> = vec![
        "list: done",
        "list home: done",
        "read: done",
        "read .runner: done",
        "write: done",
        "make: done",
        "link: done",
        "read by link: done",
    ];
    // A link may be made to anything; following it is what is refused.
    expected.extend(["list: refused", "list home: refused", "read: refused", "read .runner: refused", "write: refused"]);
    expected.extend(["make: refused", "link: done", "read by link: refused", "list all: refused", "rename: refused"]);
    assert_eq!(said, expected);
    assert_eq!(names(&world.theirs.folder.join("home")), ["mine"]);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_jobs_processes_can_neither_be_seen_nor_killed() {
    let Some(world) = World::new().await else { return };
    let rows = process::table().unwrap();
    // Its step's `sleep` comes and goes.
    let stays = |pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name != "sleep\n");
    let of_victim = |pid| process::uids_of(pid).unwrap().is_some_and(|(real, _)| real == world.theirs.uid) && stays(pid);
    let theirs: Vec<_> = rows.into_iter().filter(|row| row.runs && of_victim(row.pid)).map(|row| row.pid).collect();
    assert_eq!(theirs.len(), 3, "executor, runner and step");
    let before: Vec<_> = theirs.iter().map(|pid| ProcessIdentity::of(*pid).unwrap()).collect();
    let pids = theirs.iter().chain([&world.system.controller()]).map(u32::to_string).collect::<Vec<_>>().join(" ");
    let said = world
        .outcomes(&format!(
            r#"sleep 60 & mine=$!
               probe "own environ" grep -q PATH /proc/$mine/environ
               probe "own kill" kill -KILL $mine
               for pid in {pids}; do
               probe "environ" cat /proc/$pid/environ
               probe "cmdline" cat /proc/$pid/cmdline
               probe "stop" kill -STOP $pid
               probe "kill" kill -KILL $pid
               done"#
        ))
        .await;
    let refused = ["environ: refused", "cmdline: refused", "stop: refused", "kill: refused"];
    let expected: Vec<_> = ["own environ: done", "own kill: done"].into_iter().chain(refused.repeat(theirs.len() + 1)).collect();
    assert_eq!(said, expected);
    // All that a job may signal, it may: its own environment dies of it, and nothing else.
    let view = world.attempt("kill -KILL -1").await;
    assert_eq!(view.status, JobStatus::Failure, "{:#?}", view.log);
    let dead: Vec<_> = before.iter().filter(|one| !one.as_ref().is_some_and(|one| one.is_alive().unwrap())).collect();
    assert!(dead.is_empty(), "{dead:?}");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controllers_private_folder_is_closed_and_a_jobs_metadata_its_own_to_no_one() {
    let Some(world) = World::new().await else { return };
    let state = world.system.state().display().to_string();
    let said = world
        .outcomes(&format!(
            r#"own=${{HOME%/home}}; own=${{own##*/}}
               records={state}/private/environments
               probe "pass through" test -d {state}/env/$own
               probe "list state" ls {state}
               probe "list private" ls {state}/private
               for file in queue.redb seal.key capability.key ca/ca.pem controller.sock environments/$own.json logs/$own.log; do
               probe "read ${{file%/$own*}}" cat {state}/private/$file
               probe "remove ${{file%/$own*}}" rm -f {state}/private/$file
               done
               probe "write metadata" cp /dev/null $records/$own.json
               probe "append metadata" tee -a $records/$own.json
               probe "make a record" touch $records/forged.json
               probe "list sockets" ls {state}/sock
               probe "remove own socket" rm ${{SPIFFE_ENDPOINT_SOCKET#unix://}}
               probe "make a socket" touch {state}/sock/forged
               probe "read token" cat {state}/../read-token"#
        ))
        .await;
    let files = ["queue.redb", "seal.key", "capability.key", "ca/ca.pem", "controller.sock", "environments", "logs"];
    let of_files = files.iter().flat_map(|file| [format!("read {file}"), format!("remove {file}")]);
    let mut expected = vec!["pass through: done".to_owned()];
    let before = ["list state", "list private"].map(str::to_owned);
    let after = "write metadata,append metadata,make a record,list sockets,remove own socket,make a socket,read token";
    let attempts = before.into_iter().chain(of_files).chain(after.split(',').map(str::to_owned));
    expected.extend(attempts.map(|attempt| format!("{attempt}: refused")));
    assert_eq!(said, expected);
    for file in ["queue.redb", "seal.key", "capability.key", "ca/ca.pem", "controller.sock"] {
        assert!(world.system.state().join("private").join(file).exists(), "{file} is gone");
    }
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_cannot_look_into_its_own_executor() {
    let Some(world) = World::new().await else { return };
    let said = world
        .outcomes(
            r#"executor=
               for folder in /proc/[0-9]*; do
               case "$(tr '\0' ' ' < $folder/cmdline)" in *" executor "*) executor=${folder##*/};; esac
               done
               sleep 60 & mine=$!
               for pid in $mine $executor; do
               probe "environ" cat /proc/$pid/environ
               probe "maps" cat /proc/$pid/maps
               probe "memory" dd if=/proc/$pid/mem of=/dev/null bs=1 count=0
               probe "files" ls /proc/$pid/fd/
               probe "folder" readlink /proc/$pid/cwd
               probe "stack" cat /proc/$pid/auxv
               done
               if command -v gdb; then
               probe "debugger" sh -c "gdb -batch -p $executor -ex 'info proc' < /dev/null | grep -q 'process $executor'"
               else echo "debugger: refused"; fi
               kill $mine"#,
        )
        .await;
    let calls = ["environ", "maps", "memory", "files", "folder", "stack"];
    let mut expected: Vec<_> = calls.iter().map(|call| format!("{call}: done")).collect();
    expected.extend(calls.iter().chain(&["debugger"]).map(|call| format!("{call}: refused")));
    assert_eq!(said, expected);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_tricks_at_its_own_bridge_reach_nothing() {
    let Some(world) = World::new().await else { return };
    // Whoever is called by absolute form or CONNECT would be heard here.
    let elsewhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    elsewhere.set_nonblocking(true).unwrap();
    let other = elsewhere.local_addr().unwrap();
    let service = "runner.v1.RunnerService/UpdateTask?trick";
    let hidden = [
        format!("POST //api/actions/{service}"),
        format!("POST /api//actions/{service}"),
        format!("POST /api/./actions/{service}"),
        format!("POST /api/%61ctions/{service}"),
        format!("POST /api%2factions/{service}"),
        "POST /api%2Factions%2Frunner.v1.RunnerService%2FUpdateTask?trick".to_owned(),
        format!("POST /api/%2561ctions/{service}"),
        format!("POST /API/Actions/{service}"),
        format!("POST /api\\actions/{service}"),
        format!("POST /api/actions/{}", service.replace("UpdateTask", "Trick")),
    ];
    let refused = [
        format!("POST /api/actions/../actions/{service}"),
        format!("POST /api/actions/../../api/actions/{service}"),
        format!("POST /trick/../api/actions/{service}"),
        format!("POST /trick/%2e%2e/api/actions/{service}"),
        format!("POST /trick/.%2E/api/actions/{service}"),
        format!("POST /trick%2f..%2fapi/actions/{service}"),
        format!("POST /trick/%252e%252e/api/actions/{service}"),
        format!("POST http://{other}/trick"),
        format!("GET http://127.0.0.1/api/actions/{service}"),
        "OPTIONS *".to_owned(),
    ];
    let tunnel = format!("CONNECT {other}");
    let mut script = "echo \"control: $(raw $port 'GET /control HTTP/1.1' $token)\"\n".to_owned();
    let lines: Vec<_> = hidden.iter().chain(&refused).chain([&tunnel]).collect();
    for line in &lines {
        script += &format!("echo \"{}: $(raw $port '{line} HTTP/1.1' $token)\"\n", line.replace('\\', "(backslash)"));
    }
    let said = world.outcomes(&script).await;
    let status = |row: &String| row.rsplit(' ').next().unwrap().to_owned();
    let (control, tricks) = said.split_first().unwrap();
    assert_eq!(control, "control: 404", "it goes on to the forge, which does not have it");
    assert_eq!(tricks.len(), lines.len(), "{said:#?}");
    for (row, line) in tricks.iter().zip(&lines) {
        let expected = match line {
            line if hidden.contains(line) => ["404", "400"].as_slice(),
            line if refused.contains(line) => &["400"],
            _ => &["405", "400"],
        };
        assert!(expected.contains(&status(row).as_str()), "{row}");
    }
    let seen = world.system.forge.seen();
    assert!(seen.iter().any(|seen| seen.path.contains("control")), "the attempts do come from the bridge");
    let reached: Vec<_> = seen.iter().filter(|seen| seen.path.to_lowercase().contains("trick")).collect();
    assert!(reached.is_empty(), "{reached:#?}");
    assert!(elsewhere.accept().is_err(), "somebody called elsewhere");
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_leaves_no_process_behind_whatever_it_does() {
    let Some(world) = World::new().await else { return };
    let script = "setsid sleep 47110001 < /dev/null > /dev/null 2>&1 &\n\
                  ( nohup sleep 47110002 < /dev/null > /dev/null 2>&1 & )\n\
                  ( ( trap '' TERM HUP INT QUIT; setsid sleep 47110003 < /dev/null > /dev/null 2>&1 & ) & )\n\
                  setsid bash -c 'trap \"\" TERM HUP INT; while :; do sleep 47110004; done' < /dev/null > /dev/null 2>&1 &\n\
                  ( ( setsid bash -c 'while :; do setsid bash -c \"sleep 47110005\" & sleep 0.05; done' < /dev/null > /dev/null 2>&1 & ) & )\n\
                  echo left; until [ -e $HOME/go ]; do sleep 0.1; done";
    let id = world.system.push(job("leaver", script));
    world.system.says(id, "left").await;
    let mine = world.system.environment(id);
    let sleepers = || {
        let line = |pid| fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let rows = process::table().unwrap().into_iter().filter(|row| row.runs);
        rows.filter_map(|row| String::from_utf8(line(row.pid)).ok())
            .filter(|line| line.starts_with("sleep\x004711000"))
            .collect::<Vec<_>>()
    };
    let all = async || (1..=5).all(|one| sleepers().iter().any(|line| line.contains(&format!("4711000{one}")))).then_some(());
    eventually("all that it leaves behind runs", LIMIT, all).await;
    fs::write(mine.folder.join("home/go"), "").unwrap();
    let view = world.system.ended(id).await;
    assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
    assert_eq!(sleepers(), Vec::<String>::new());
    let of_uid =
        process::table().unwrap().into_iter().filter(|row| process::uids_of(row.pid).unwrap().is_some_and(|u| u.0 == mine.uid));
    assert_eq!(of_uid.filter(|row| row.runs).count(), 0);
    world.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_finds_its_capability_in_no_variable_and_in_no_file() {
    let Some(world) = World::new().await else { return };
    let state: PathBuf = world.system.state();
    // The text to look for comes in two halves, so that what is found is not the question.
    let script = format!(
        "echo ready; until [ -e $HOME/halves ]; do sleep 0.1; done; read -r one two < $HOME/halves\n\
         found() {{ grep -rlsaF -f <(printf '%s%s\\n' $one $two) \"$@\" | sed 's/^/found: /'; }}\n\
         printf '%s%s' $one $two > $HOME/control; found $HOME; rm $HOME/control\n\
         found ${{HOME%/home}} {} /tmp /var/tmp /dev/shm /run /etc/hostname\n\
         found /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env; echo looked",
        state.display()
    );
    let id = world.system.push(job("seeker", &script));
    world.system.says(id, "ready").await;
    let mine = world.system.environment(id);
    let capability = mine.variables["CI_RUNNER_CAPABILITY"].clone();
    let (one, two) = capability.split_at(32);
    fs::write(mine.folder.join("home/halves.new"), format!("{one} {two}\n")).unwrap();
    fs::rename(mine.folder.join("home/halves.new"), mine.folder.join("home/halves")).unwrap();
    let view = world.system.ended(id).await;
    assert_eq!(view.status, JobStatus::Success, "{:#?}", view.log);
    let found: Vec<_> = view.log.iter().filter(|row| row.starts_with("found: ")).collect();
    assert!(found.len() == 1 && found[0].ends_with("/home/control"), "{found:#?}");
    assert!(view.log.iter().any(|row| row == "looked") && view.log.iter().any(|row| row.starts_with("CI_SPIFFE_ID=")));
    assert!(!view.log.iter().any(|row| row.contains(&capability) || row.starts_with("CI_RUNNER_CAPABILITY")));
    world.end().await;
}
