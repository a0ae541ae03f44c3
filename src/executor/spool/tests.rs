//! Any interleaving of what the runner says and what Gitea answers ends with the same log, in the same order.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::*;

const TASK: i64 = 7;
const RESULT: TaskResult = TaskResult::RESULT_SUCCESS;

/// Gitea, as `gitea.md` §3.7 and §3.9 describe it.
#[derive(Default)]
struct Gitea {
    rows: Vec<String>,
    sealed: bool,
    states: Vec<TaskState>,
    outputs: BTreeSet<String>,
}

impl Gitea {
    fn with_rows(rows: i64) -> Self {
        Self { rows: (0..rows).map(|n| format!("controller {n}")).collect(), ..Self::default() }
    }

    fn update_log(&mut self, request: &UpdateLogRequest) -> i64 {
        let held = self.rows.len() as i64;
        if request.index <= held && !self.sealed {
            self.rows.extend(request.rows.iter().skip((held - request.index) as usize).map(|row| row.content.clone()));
            self.sealed |= request.no_more && !request.rows.is_empty();
        }
        self.rows.len() as i64
    }

    fn update_task(&mut self, request: &UpdateTaskRequest) -> Vec<String> {
        let state = request.state.as_option().unwrap().clone();
        for step in &state.steps {
            assert!(step.log_index + step.log_length <= self.rows.len() as i64, "a state overtook its rows");
        }
        self.states.push(state);
        self.outputs.extend(request.outputs.keys().cloned());
        self.outputs.iter().cloned().collect()
    }
}

fn row(content: &str) -> LogRow {
    LogRow { content: content.to_owned(), ..placeholder("") }
}

fn state(result: TaskResult, rows: i64) -> TaskState {
    let step = StepState { id: 0, log_index: 0, log_length: rows, ..Default::default() };
    TaskState { id: TASK, result: result.into(), steps: vec![step], ..Default::default() }
}

fn tight(memory: usize) -> StoreLimits {
    StoreLimits { memory, segment: 700, disk_reserve: 0 }
}

/// One delivery: `answered` is whether the answer of a request that arrived came back.
fn deliver(spool: &mut Spool, gitea: &mut Gitea, answered: bool) -> Next {
    let next = spool.next_step();
    match &next {
        Next::Log(request) => {
            let ack = gitea.update_log(request);
            if answered {
                spool.log_answered(end_of(request), request.no_more, ack);
            }
        }
        Next::State(request) | Next::Terminal(request) => {
            let listed = gitea.update_task(request);
            if answered {
                spool.state_answered(request, &listed);
            }
        }
        Next::NoVerdict | Next::Wait => {}
    }
    next
}

fn finish(spool: &mut Spool, gitea: &mut Gitea) -> Next {
    spool.runner_exited(None);
    for _ in 0..100_000 {
        match deliver(spool, gitea, true) {
            end @ (Next::Terminal(_) | Next::NoVerdict) => return end,
            Next::Wait => panic!("nothing to do and not at the end"),
            Next::Log(_) | Next::State(_) => {}
        }
    }
    panic!("no end");
}

#[derive(Debug, Clone)]
enum Step {
    /// New rows, after so many that were sent before.
    Rows {
        new: usize,
        again: usize,
        bytes: usize,
    },
    State,
    Output(u8),
    Deliver {
        answered: bool,
    },
    Heartbeat,
    LateAck,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..20usize, 0..6usize, 0..300usize).prop_map(|(new, again, bytes)| Step::Rows { new, again, bytes }),
        2 => Just(Step::State),
        1 => any::<u8>().prop_map(Step::Output),
        5 => any::<bool>().prop_map(|answered| Step::Deliver { answered }),
        1 => Just(Step::Heartbeat),
        1 => Just(Step::LateAck),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_interleaving_delivers_each_row_once_and_in_order(
        steps in proptest::collection::vec(step(), 0..120),
        offset in 0..4i64,
        memory in 0..4000usize,
        no_more in any::<bool>(),
        verdict in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut spool = Spool::new(TASK, offset, folder.path(), tight(memory));
        let mut gitea = Gitea::with_rows(offset);
        let mut said: Vec<String> = Vec::new();
        let mut acked = 0;
        for step in steps {
            match step {
                Step::Rows { new, again, bytes } => {
                    let from = said.len().saturating_sub(again);
                    let first = said.len();
                    said.extend((first..first + new).map(|n| format!("{n} {}", "x".repeat(bytes))));
                    let rows: Vec<LogRow> = said[from..].iter().map(|text| row(text)).collect();
                    let ack = spool.take_rows(from as i64, rows, false);
                    prop_assert!(ack >= acked && ack == said.len() as i64);
                    acked = ack;
                }
                Step::State => spool.take_state(state(TaskResult::RESULT_UNSPECIFIED, said.len() as i64), []),
                Step::Output(n) => spool.take_state(state(TaskResult::RESULT_UNSPECIFIED, 0), [(format!("o{n}"), "v".into())]),
                Step::Deliver { answered } => {
                    let next = deliver(&mut spool, &mut gitea, answered);
                    prop_assert!(!matches!(next, Next::Terminal(_) | Next::NoVerdict));
                }
                Step::Heartbeat => {
                    let request = spool.heartbeat();
                    let listed = gitea.update_task(&request);
                    spool.state_answered(&request, &listed);
                }
                // The answer to an older request, or one that claims more than was sent.
                Step::LateAck => {
                    let ack = gitea.rows.len() as i64;
                    spool.log_answered(ack, false, ack.saturating_add(1000));
                }
            }
        }
        spool.take_rows(said.len() as i64, vec![], no_more);
        if verdict {
            spool.take_state(state(RESULT, said.len() as i64), []);
            prop_assert!(!matches!(spool.next_step(), Next::Terminal(_)), "a verdict before the runner's exit");
        }
        let end = finish(&mut spool, &mut gitea);
        let ours: Vec<&String> = gitea.rows.iter().skip(offset as usize).collect();
        prop_assert_eq!(&ours[..said.len()], &said.iter().collect::<Vec<_>>()[..]);
        prop_assert!(ours[said.len()..].iter().all(|carrier| carrier.is_empty()) && ours.len() <= said.len() + 1);
        prop_assert_eq!(gitea.sealed, verdict);
        prop_assert_eq!(matches!(end, Next::Terminal(_)), verdict);
        if verdict {
            prop_assert!(gitea.states.last().unwrap().result == RESULT);
            prop_assert!(gitea.outputs.iter().cloned().eq(spool.output_keys()));
        }
        drop(spool);
        prop_assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "files are left");
    }
}

#[test]
fn an_answer_to_the_runner_is_never_above_what_it_sent_and_never_below_what_it_had() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 3, folder.path(), StoreLimits::default());
    assert_eq!(spool.take_rows(0, vec![row("a"), row("b"), row("c")], false), 3);
    assert_eq!(spool.take_rows(0, vec![row("a")], false), 1, "an old request again");
    assert_eq!(spool.take_rows(2, vec![row("c"), row("d")], false), 4, "an overlap");
    assert_eq!(spool.take_rows(9, vec![row("z")], false), 4, "a gap");
    assert_eq!(spool.take_rows(-1, vec![row("z")], false), 4);
    assert_eq!(spool.take_rows(4, vec![], false), 4);
    let mut gitea = Gitea::with_rows(3);
    finish(&mut spool, &mut gitea);
    assert_eq!(gitea.rows[3..], ["a", "b", "c", "d"]);
}

#[test]
fn rows_and_steps_are_shifted_and_a_huge_row_is_cut_between_characters() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 5, folder.path(), StoreLimits::default());
    spool.take_rows(0, vec![row(&"ü".repeat(5 << 20))], true);
    spool.take_state(TaskState { steps: vec![StepState { id: 1, ..Default::default() }], ..state(RESULT, 1) }, []);
    let mut gitea = Gitea::with_rows(5);
    assert_eq!(spool.next_step(), Next::Wait, "the last row waits for the runner's exit, to carry `no_more`");
    assert!(matches!(finish(&mut spool, &mut gitea), Next::Terminal(_)));
    assert_eq!(gitea.rows[5], "ü".repeat(32 << 10));
    assert!(gitea.sealed && gitea.rows.len() == 6);
    assert_eq!(gitea.states.last().unwrap().steps[0].log_index, 0, "a step without rows");
    let mut spool = Spool::new(TASK, 5, folder.path(), StoreLimits::default());
    spool.take_rows(0, vec![row("a"), row("b")], false);
    let step = StepState { id: 2, log_index: 1, log_length: 1, ..Default::default() };
    spool.take_state(TaskState { steps: vec![step], ..state(TaskResult::RESULT_FAILURE, 2) }, []);
    let mut gitea = Gitea::with_rows(5);
    finish(&mut spool, &mut gitea);
    assert_eq!(gitea.states.last().unwrap().steps[0].log_index, 6);
}

#[test]
fn requests_stay_small() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 0, folder.path(), StoreLimits::default());
    spool.take_rows(0, (0..400).map(|_| row(&"x".repeat(20_000))).collect(), false);
    let outputs = (0..5).map(|n| (format!("o{n}"), "v".repeat(MAX_OUTPUT_VALUE)));
    spool.take_state(state(RESULT, 400), outputs.chain([("k".repeat(256), "v".into())]));
    assert_eq!(spool.output_keys().len(), 6, "the runner is told that all are sent");
    spool.runner_exited(None);
    let mut gitea = Gitea::default();
    loop {
        match deliver(&mut spool, &mut gitea, true) {
            Next::Log(request) => assert!(buffa::Message::encode_to_vec(&request).len() <= MAX_BATCH_BYTES + 1000),
            Next::State(request) | Next::Terminal(request) if request.outputs.len() > 1 => panic!("too large a request"),
            Next::Terminal(_) => break,
            Next::State(_) => {}
            Next::Wait | Next::NoVerdict => panic!("no end"),
        }
    }
    assert_eq!((gitea.rows.len(), gitea.outputs.len()), (400, 5));
}

#[test]
fn a_full_disk_leaves_the_rows_in_their_places_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let limits = StoreLimits { memory: 1000, segment: 1000, disk_reserve: u64::MAX };
    let mut spool = Spool::new(TASK, 0, folder.path(), limits);
    spool.take_rows(0, (0..1000).map(|n| row(&format!("{n}"))).collect(), true);
    spool.take_state(state(RESULT, 1000), []);
    let mut gitea = Gitea::default();
    finish(&mut spool, &mut gitea);
    assert_eq!(gitea.rows.len(), 1000, "indices stay aligned");
    let kept = gitea.rows.iter().enumerate().take_while(|(n, row)| **row == n.to_string()).count();
    assert!(kept > 5 && kept < 100, "{kept}");
    assert!(
        gitea.rows[kept].starts_with("[log rows are missing from here on: write spool: the disk is full"),
        "{}",
        gitea.rows[kept]
    );
    assert!(gitea.rows[kept + 1..].iter().all(String::is_empty));
}

#[test]
fn a_restored_gitea_gets_the_missing_places_filled() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 2, folder.path(), tight(100));
    let mut gitea = Gitea::with_rows(2);
    spool.take_rows(0, (0..50).map(|n| row(&format!("{n}"))).collect(), false);
    while deliver(&mut spool, &mut gitea, true) != Next::Wait {}
    assert_eq!(gitea.rows.len(), 52);
    gitea.rows.truncate(1);
    spool.take_rows(50, vec![row("after")], false);
    spool.take_state(state(RESULT, 51), []);
    assert!(matches!(finish(&mut spool, &mut gitea), Next::Terminal(_)));
    assert_eq!(gitea.rows.len(), 53);
    assert_eq!(gitea.rows[1], "[51 log rows were lost here: Gitea had them and has them no more]");
    assert!(gitea.rows[2..52].iter().all(String::is_empty));
    assert_eq!(gitea.rows[52], "after");
}

#[test]
fn an_archived_log_counts_as_taken() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 0, folder.path(), tight(100));
    spool.take_rows(0, (0..50).map(|n| row(&format!("{n}"))).collect(), false);
    spool.take_state(state(TaskResult::RESULT_UNSPECIFIED, 50), []);
    spool.log_taken();
    assert_eq!(spool.take_rows(50, vec![row("later")], true), 51);
    spool.take_state(state(RESULT, 51), []);
    let mut gitea = Gitea { rows: vec![String::new(); 60], sealed: true, ..Gitea::default() };
    assert!(matches!(finish(&mut spool, &mut gitea), Next::Terminal(_)));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_verdict_is_taken_once_and_a_runner_without_one_leaves_the_log_open() {
    let folder = tempfile::tempdir().unwrap();
    let mut spool = Spool::new(TASK, 0, folder.path(), StoreLimits::default());
    spool.take_state(state(TaskResult::RESULT_FAILURE, 0), []);
    spool.take_state(state(RESULT, 0), [("late".into(), "v".into())]);
    let mut gitea = Gitea::default();
    finish(&mut spool, &mut gitea);
    assert!(gitea.states.last().unwrap().result == TaskResult::RESULT_FAILURE);
    assert_eq!((gitea.rows.len(), gitea.sealed, gitea.outputs.len()), (1, true, 1));

    let mut spool = Spool::new(TASK, 0, folder.path(), StoreLimits::default());
    spool.take_rows(0, vec![row("a"), row("killed")], true);
    let mut gitea = Gitea::default();
    assert_eq!(finish(&mut spool, &mut gitea), Next::NoVerdict);
    assert_eq!((gitea.rows.len(), gitea.sealed), (2, false));
}
