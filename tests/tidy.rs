//! House rules that a program can check: who may use whom, how long files and functions are, head comments, paths of one machine,
//! and that settings, metrics and failure windows stand in the documents as they are.
//!
//! It reads the sources as text and knows only the rooms that `ROOMS` names: a new room must be put into a layer there. What a
//! room does not have yet is no fault.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use gitea_dynamic_runner::{config::VARIABLES, metrics::Metrics, names::env};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layer {
    /// No IO; they use one another.
    Fact,
    /// One neighbour each.
    Edge,
    /// Passes and handlers; they meet in an edge or through what `daemon` hands them.
    Role,
    /// Sees everything, decides nothing.
    Wiring,
    /// What runs inside an environment.
    Executor,
    Demo,
}

const ROOMS: &[(&str, Layer)] = &[
    ("assignment", Layer::Fact),
    ("backoff", Layer::Fact),
    ("board", Layer::Fact),
    ("printable", Layer::Fact),
    ("claims", Layer::Fact),
    ("drain", Layer::Fact),
    ("environment", Layer::Fact),
    ("failpoint", Layer::Fact),
    ("files", Layer::Fact),
    ("ids", Layer::Fact),
    ("names", Layer::Fact),
    ("plan", Layer::Fact),
    ("process", Layer::Fact),
    ("proto", Layer::Fact),
    ("secret", Layer::Fact),
    ("spiffe_name", Layer::Fact),
    ("task", Layer::Fact),
    ("backend", Layer::Edge),
    ("gitea", Layer::Edge),
    ("identity", Layer::Edge),
    ("leader", Layer::Edge),
    ("metrics", Layer::Edge),
    ("mirror", Layer::Edge),
    ("queue", Layer::Edge),
    ("backlog", Layer::Role),
    ("facade", Layer::Role),
    ("http", Layer::Role),
    ("reconcile", Layer::Role),
    ("scheduler", Layer::Role),
    ("slots", Layer::Role),
    ("waiting", Layer::Role),
    ("worker", Layer::Role),
    ("cli", Layer::Wiring),
    ("config", Layer::Wiring),
    ("daemon", Layer::Wiring),
    ("doctor", Layer::Wiring),
    ("health", Layer::Wiring),
    ("supervise", Layer::Wiring),
    ("telemetry", Layer::Wiring),
    ("executor", Layer::Executor),
    ("demo", Layer::Demo),
];

/// Uses across a layer's rule that are wanted: (who, what, why).
const ALLOWED: &[(&str, &str, &str)] = &[
    ("backend", "leader::LeaderPass", "the right to act is an argument"),
    ("queue", "leader::LeaderPass", "the right to act is an argument"),
    ("leader", "queue::embedded", "the open database is the proof of leadership"),
    ("leader", "queue::jetstream", "the lock of its outbox is the proof of leadership"),
    ("executor", "gitea", "the bridge speaks Gitea's protocol"),
    ("executor", "identity", "the bridge has the environment's identity"),
    ("reconcile", "slots", "only who sees an environment gone may free its slot, and only who counts them may restore one"),
    ("waiting", "slots", "who has a slot already does not wait for one"),
    ("worker", "slots", "the worker takes a slot before it leases"),
];

/// Lines of a source file before its inline tests.
const FILE_BUDGET: usize = 400;
/// Lines of a source file with its inline tests.
const FILE_BUDGET_WITH_TESTS: usize = 600;
/// Lines of a function, above which it needs a reason here; above `FUNCTION_LIMIT` there is none.
const FUNCTION_BUDGET: usize = 60;
const FUNCTION_LIMIT: usize = 80;
/// (file, function, why it may be longer than the budget)
const LONG_FUNCTIONS: &[(&str, &str, &str)] = &[];

/// One file of `src/` that a person wrote.
struct Source {
    /// Relative to the repository.
    path: String,
    room: String,
    text: String,
}

impl Source {
    /// Without the inline tests, which come last.
    fn product(&self) -> &str {
        self.text.split("\n#[cfg(test)]").next().unwrap_or_default()
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_under(&path));
        } else {
            files.push(path);
        }
    }
    files
}

fn sources() -> Vec<Source> {
    let files = files_under(&root().join("src"));
    let written = files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs") && !is_generated(file));
    written
        .map(|file| {
            let path = file.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
            let room = path.split('/').nth(1).unwrap().trim_end_matches(".rs").to_owned();
            Source { room, text: std::fs::read_to_string(&file).unwrap(), path }
        })
        .collect()
}

fn is_generated(file: &Path) -> bool {
    file.components().any(|part| part.as_os_str() == "generated")
}

fn layer(room: &str) -> Option<Layer> {
    ROOMS.iter().find(|(name, _)| *name == room).map(|(_, layer)| *layer)
}

/// The paths below `crate::` that a text uses, nested braces resolved: `a::B`, `c`.
fn uses(text: &str) -> BTreeSet<String> {
    let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(|line| [line, "\n"]).collect();
    let mut found = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        // `other_crate::` ends the same way.
        if code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        expand("", &code[at + "crate::".len()..], &mut found);
    }
    found
}

/// Reads one use tree at the head of `text`, puts its leaves into `found`, and returns what follows it.
fn expand<'a>(prefix: &str, text: &'a str, found: &mut BTreeSet<String>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = rest.trim_start().trim_start_matches(',').trim_start();
            if let Some(after) = rest.strip_prefix('}') {
                return after;
            }
            let after = expand(prefix, rest, found);
            if after.len() == rest.len() {
                return after;
            }
            rest = after;
        }
    }
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let path = format!("{prefix}{}", &text[..end]);
    match text[end..].strip_prefix("::") {
        Some(rest) => expand(&format!("{path}::"), rest, found),
        None => {
            found.insert(path);
            &text[end..]
        }
    }
}

/// Why `room` may not use the room of `path`, if it may not.
fn forbidden(room: &str, path: &str) -> Option<&'static str> {
    let used = path.split("::").next().unwrap_or_default();
    let allowed =
        |(who, what, _): &&(&str, &str, &str)| *who == room && (path == *what || path.starts_with(&format!("{what}::")));
    if used == room || ALLOWED.iter().any(|entry| allowed(&entry)) {
        return None;
    }
    match (layer(room)?, layer(used)?) {
        (_, Layer::Fact) | (Layer::Wiring | Layer::Demo, _) | (Layer::Role, Layer::Edge) => None,
        (from, Layer::Edge) if used == "metrics" && from != Layer::Fact => None,
        (Layer::Fact, _) => Some("facts use only facts"),
        (Layer::Edge, Layer::Edge) => Some("an edge never uses an edge"),
        (Layer::Role, Layer::Role) => Some("a role never uses a role"),
        (Layer::Executor, _) => Some("the executor uses only facts, gitea and identity"),
        (Layer::Edge | Layer::Role, _) => Some("lower layers never use higher ones"),
    }
}

fn assert_none(faults: &[String]) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn every_room_has_a_layer_and_uses_only_what_its_layer_may() {
    let mut faults = Vec::new();
    for source in sources() {
        if ["lib", "main"].contains(&source.room.as_str()) {
            continue;
        }
        if layer(&source.room).is_none() {
            faults.push(format!("{}: the room `{}` is in no layer: add it to ROOMS", source.path, source.room));
        }
        for path in uses(source.product()) {
            if let Some(why) = forbidden(&source.room, &path) {
                faults.push(format!("{}: uses crate::{path}: {why}", source.path));
            }
        }
    }
    assert_none(&faults);
}

#[test]
fn the_layer_check_sees_what_it_must() {
    let text = "use crate::{\n    ids::{TaskId, Lane},\n    queue,\n};\n// use crate::daemon;\nfn f() { crate::worker::go(); my_crate::x(); }\n";
    let expected = ["ids::Lane", "ids::TaskId", "queue", "worker::go"].map(str::to_owned);
    assert_eq!(uses(text), BTreeSet::from(expected));
    assert!(forbidden("queue", "gitea::Client").is_some());
    assert!(forbidden("scheduler", "worker::go").is_some());
    assert!(forbidden("executor", "queue::Lease").is_some());
    assert!(forbidden("ids", "queue::Lease").is_some());
    assert!(forbidden("backend", "leader::Lease").is_some());
    assert!(forbidden("backend", "leader::LeaderPass").is_none());
    assert!(forbidden("daemon", "worker::go").is_none());
}

#[test]
fn files_are_short_enough_to_be_read() {
    let mut faults = Vec::new();
    for source in sources() {
        let (product, all) = (source.product().lines().count(), source.text.lines().count());
        if product > FILE_BUDGET {
            faults.push(format!("{}: {product} lines before its tests, the budget is {FILE_BUDGET}: split it", source.path));
        }
        if all > FILE_BUDGET_WITH_TESTS {
            faults.push(format!(
                "{}: {all} lines with its tests, the budget is {FILE_BUDGET_WITH_TESTS}: move tests to tests/",
                source.path
            ));
        }
    }
    assert_none(&faults);
}

/// Name, first line and length of each function, by indentation: rustfmt closes it where it began.
fn functions(text: &str) -> Vec<(String, usize, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (first, line) in lines.iter().enumerate() {
        let code = line.trim_start();
        let words: Vec<&str> = code.split_whitespace().collect();
        let Some(keyword) = words.iter().position(|word| *word == "fn") else { continue };
        let modifiers = ["pub", "pub(crate)", "pub(super)", "async", "const", "unsafe", "extern"];
        if !words[..keyword].iter().all(|word| modifiers.contains(word)) || keyword + 1 >= words.len() {
            continue;
        }
        let close = format!("{}}}", &line[..line.len() - code.len()]);
        let opens = lines[first..].iter().position(|line| line.ends_with('{') || line.ends_with(';') || line.ends_with('}'));
        let Some(head) = opens.map(|offset| first + offset).filter(|head| lines[*head].ends_with('{')) else { continue };
        let Some(length) = lines[head..].iter().position(|line| **line == close) else { continue };
        let name = words[keyword + 1].split(['(', '<']).next().unwrap_or_default();
        found.push((name.to_owned(), first + 1, head + length + 1 - first));
    }
    found
}

#[test]
fn functions_are_short_enough_to_be_understood() {
    let mut faults = Vec::new();
    for source in sources() {
        for (name, line, length) in functions(source.product()) {
            let excused = LONG_FUNCTIONS.iter().any(|(path, function, _)| *path == source.path && *function == name);
            if length > FUNCTION_LIMIT || (length > FUNCTION_BUDGET && !excused) {
                faults.push(format!("{}:{line}: {name} has {length} lines, the budget is {FUNCTION_BUDGET}", source.path));
            }
        }
    }
    assert_none(&faults);
}

#[test]
fn the_function_check_sees_what_it_must() {
    let text = "impl A {\n    pub async fn one(\n        &self,\n    ) -> u8 {\n        1\n    }\n\n    fn two();\n}\n\nfn three<T>() {\n    // fn no() {\n}\n";
    let expected = [("one".to_owned(), 2, 5), ("three".to_owned(), 11, 3)];
    assert_eq!(functions(text), expected);
}

#[test]
fn every_file_begins_by_saying_what_it_is_for() {
    let mut faults = Vec::new();
    let tests = files_under(&root().join("tests")).into_iter().filter(|file| file.extension().is_some_and(|e| e == "rs"));
    let tests = tests
        .filter(|file| !is_generated(file))
        .map(|file| (file.display().to_string(), std::fs::read_to_string(&file).unwrap()));
    for (path, text) in sources().into_iter().map(|source| (source.path, source.text)).chain(tests) {
        if !text.starts_with("//! ") {
            faults.push(format!("{path}: has no head comment (//!)"));
        }
    }
    assert_none(&faults);
}

/// The files that git knows or would add.
fn repository_files() -> Vec<PathBuf> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).unwrap();
    let files = names.lines().map(|name| root().join(name)).filter(|file| file.is_file());
    files.collect()
}

#[test]
fn no_file_names_a_path_of_one_machine() {
    // Put together here, so that this file is not its own finding.
    let paths = ["root", "tmp/wt", "work"].map(|name| format!("/{name}/"));
    let mut faults = Vec::new();
    for file in repository_files() {
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        for (number, line) in text.lines().enumerate() {
            let of_machine = |path: &&String| {
                // A folder inside a project (`docs/work/`) is no path of a machine.
                line.match_indices(path.as_str())
                    .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "_.}-)".contains(c)))
            };
            if let Some(path) = paths.iter().find(of_machine) {
                faults.push(format!("{}:{}: names {path}", file.display(), number + 1));
            }
        }
    }
    assert_none(&faults);
}

/// Words in quotes that look like a variable of the environment.
fn variables_in(text: &str) -> BTreeSet<String> {
    let quoted =
        text.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(|line| line.split('"').skip(1).step_by(2));
    let is_variable = |word: &&str| {
        word.len() > 4
            && word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
    };
    quoted.filter(is_variable).map(str::to_owned).collect()
}

/// The names in backquotes of a page's table rows, first column; `cells` of those rows must not be empty.
fn table_names(page: &str, cells: usize) -> BTreeSet<String> {
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let whole = rows.filter(|row| row.split('|').skip(1).take(cells).filter(|cell| !cell.trim().is_empty()).count() == cells);
    let first = whole.filter_map(|row| row.split('|').nth(1));
    first.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
}

fn page(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Read from the environment, but by others, too, or to say that the version that uses it is a later one.
const NO_SETTINGS: [&str; 2] = ["SPIRE", "OPENSANDBOX_API"];

#[test]
fn every_setting_that_is_read_is_in_the_readme_with_its_default() {
    let explained = table_names(&page("README.md"), 3);
    let settings = sources().into_iter().filter(|source| source.room == "config");
    let read: BTreeSet<String> = settings.flat_map(|source| variables_in(source.product())).collect();
    let listed = VARIABLES.map(str::to_owned);
    let proxies = [env::HTTP_PROXY, env::HTTPS_PROXY, env::NO_PROXY].map(|[first, _]| first.to_owned());
    let wanted = read.into_iter().filter(|name| !NO_SETTINGS.contains(&name.as_str())).chain(listed).chain(proxies);
    let missing: BTreeSet<String> = wanted.filter(|name| !explained.contains(name)).collect();
    assert_none(&missing.iter().map(|name| format!("README.md: no row explains `{name}` and its default")).collect::<Vec<_>>());
    let prefixes = ["HTTP", "GITEA_", "POD_", "VM_", "RUNNER_", "LOCAL_", "READ_", "ADMIN_", "SEAL_", "SPIFFE_", "NATS_"];
    let known = |name: &&String| VARIABLES.contains(&name.as_str()) || ["HTTP_PROXY", "HTTPS_PROXY"].contains(&name.as_str());
    let unread = explained.iter().filter(|name| prefixes.iter().any(|p| name.starts_with(p))).filter(|name| !known(name));
    assert_none(&unread.map(|name| format!("README.md explains `{name}`, which nothing reads")).collect::<Vec<_>>());
}

#[test]
fn every_metric_is_documented_and_every_documented_one_exists() {
    let documented = table_names(&page("docs/METRICS.md"), 1);
    // Families without a series are not in the text, so the registrations are read: `register("name"` and `register_with_unit("name"`.
    let source = page("src/metrics.rs");
    let named = |call: &str, unit: &str| {
        let names = source.split(call).skip(1).filter_map(|rest| rest.split('"').next());
        names.map(|name| format!("{name}{unit}")).collect::<Vec<_>>()
    };
    let exist = [named("r.register(\"", ""), named("r.register_with_unit(\"", "_seconds")].concat();
    assert!(exist.len() > 20 && exist.contains(&"fetch_duration_seconds".to_owned()), "{exist:?}");
    let shown = |name: &String| ["", "_total", "_info"].map(|suffix| format!("{name}{suffix}"));
    let undocumented = exist.iter().filter(|name| !shown(name).iter().any(|shown| documented.contains(shown)));
    let undocumented = undocumented.map(|name| format!("docs/METRICS.md does not explain {name}"));
    let invented = documented.iter().filter(|name| !exist.iter().any(|known| shown(known).contains(name)));
    let invented = invented.map(|name| format!("docs/METRICS.md explains {name}, which does not exist"));
    assert_none(&undocumented.chain(invented).collect::<Vec<_>>());
    let text = Metrics::new().text();
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE gitea_dynamic_runner_")?.strip_suffix(" counter"));
    let bare = types.filter(|name| !documented.contains(&format!("{name}_total")));
    assert_none(&bare.map(|name| format!("docs/METRICS.md: {name} is a counter, so it ends in _total")).collect::<Vec<_>>());
}

#[test]
fn every_failure_window_names_a_test_that_exists_or_says_why_there_is_none() {
    let tests = files_under(&root().join("tests")).into_iter().chain(files_under(&root().join("src")));
    let tests: String = tests.filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    let mut faults = Vec::new();
    for row in page("docs/failure-windows.md").lines().filter(|line| line.starts_with("| ") && !line.starts_with("| rule |")) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [_, gap, left, repair, shown] = cells[..] else {
            faults.push(format!("five cells are wanted: {row}"));
            continue;
        };
        if [gap, left, repair].contains(&"") {
            faults.push(format!("an empty cell: {row}"));
        }
        let named: Vec<&str> = shown.split('`').skip(1).step_by(2).filter_map(|word| word.strip_prefix("test ")).collect();
        faults.extend(
            named.iter().filter(|n| !tests.contains(&format!("fn {n}("))).map(|n| format!("the test {n} does not exist: {gap}")),
        );
        let crashes = shown.contains("`failpoint ");
        if gap.contains("crash") && !crashes && !shown.contains("no failpoint: ") {
            faults.push(format!("names no failpoint, and not why there is none (`no failpoint: …`): {gap}"));
        }
        if named.is_empty() && !crashes && shown.strip_prefix("none: ").is_none_or(|why| why.len() <= 10) {
            faults.push(format!("names no test, and not why there is none (`none: …`): {gap}"));
        }
    }
    assert_none(&faults);
}

/// What stands between `before` and `after`, wherever they do.
fn between<'t>(text: &'t str, before: &str, after: &str) -> BTreeSet<&'t str> {
    text.split(before).skip(1).filter_map(|rest| rest.split_once(after)).map(|(name, _)| name).collect()
}

#[test]
fn every_failpoint_stands_among_the_failure_windows_and_is_crashed_at() {
    let sources = sources();
    let code: BTreeSet<&str> = sources.iter().flat_map(|source| between(&source.text, "failpoint::reached(\"", "\"")).collect();
    assert!(code.len() > 30, "failpoints are found: {code:?}");
    let windows = page("docs/failure-windows.md");
    assert_eq!(between(&windows, "`failpoint ", "`"), code);
    let tests = page("tests/chaos/failpoints.rs");
    let (_, listed) = tests.split_once("\ncrash_at! {").unwrap();
    let (listed, _) = listed.split_once("\n}").unwrap();
    assert_eq!(between(listed, "    \"", "\" =>"), code);
}

#[test]
fn every_fault_of_the_matrix_names_tests_that_exist() {
    let tests: String =
        files_under(&root().join("tests")).into_iter().filter_map(|file| std::fs::read_to_string(file).ok()).collect();
    let page = page("docs/faults.md");
    let rows: Vec<&str> = page.lines().filter(|line| line.starts_with("| F")).collect();
    assert!(rows.len() >= 15, "the matrix is found");
    for row in rows {
        let named = row.rsplit('|').nth(1).unwrap().split('`').skip(1).step_by(2);
        let missing: Vec<&str> = named.filter(|name| !tests.contains(&format!("fn {name}("))).collect();
        assert!(missing.is_empty() && row.contains('`'), "{missing:?} in {row}");
    }
}
