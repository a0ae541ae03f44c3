//! `man` and `completions`: what shells and `man` are told of this program, made of the program itself, so that it is never old.

use std::{io::Write as _, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, Command};

use super::told;

/// The page on which settings are explained; their table is the man page's section ENVIRONMENT.
const README: &str = include_str!("../../README.md");

#[derive(Args)]
pub(super) struct Completions {
    shell: clap_complete::Shell,
}

pub(super) fn completions(args: &Completions, mut program: Command) -> ExitCode {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    printed(&script)
}

pub(super) fn man(program: Command) -> ExitCode {
    match page(program) {
        Ok(page) => printed(&page),
        Err(e) => told(&e),
    }
}

fn printed(bytes: &[u8]) -> ExitCode {
    match std::io::stdout().write_all(bytes).context("write to standard output") {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => told(&e),
    }
}

/// One page for all: its commands, each with its own synopsis and options, then the settings.
fn page(mut program: Command) -> anyhow::Result<Vec<u8>> {
    program.build();
    let mut page = Vec::new();
    let whole = clap_mangen::Man::new(program.clone());
    whole.render_title(&mut page)?;
    whole.render_name_section(&mut page)?;
    whole.render_synopsis_section(&mut page)?;
    whole.render_description_section(&mut page)?;
    page.extend(b".SH COMMANDS\n");
    for command in program.get_subcommands().filter(|command| !command.is_hide_set() && command.get_name() != "help") {
        describe(&mut page, command, &format!("{} {}", program.get_name(), command.get_name()))?;
    }
    page.extend(b".SH ENVIRONMENT\nAll settings are environment variables; unset and empty are the same.\n");
    for (names, default, meaning) in settings() {
        writeln!(page, ".TP\n\\fB{}\\fR\n{} Default: {}.", escaped(&names), escaped(&sentence(&meaning)), escaped(&default))?;
    }
    page.extend(b".SH EXIT STATUS\n");
    for (code, meaning) in [
        ("0", "Ended as asked."),
        ("1", "A fault of the program or the machine; standard error says which."),
        ("2", "Wrong arguments."),
        ("3", "doctor: something must be done."),
        ("75", "drain \\-\\-wait: the time is over, and something still runs."),
        ("78", "Wrong settings, all of them told; or a newer version has used the state folder."),
    ] {
        writeln!(page, ".TP\n\\fB{code}\\fR\n{meaning}")?;
    }
    Ok(page)
}

fn describe(page: &mut Vec<u8>, command: &Command, name: &str) -> anyhow::Result<()> {
    writeln!(page, ".SS {}", escaped(name))?;
    let about = command.get_long_about().or_else(|| command.get_about()).map(ToString::to_string).unwrap_or_default();
    writeln!(page, "{}", escaped(&sentence(&about)))?;
    for argument in command
        .get_arguments()
        .filter(|argument| !argument.is_hide_set() && argument.get_id() != "help" && argument.get_id() != "version")
    {
        let value = argument.get_value_names().unwrap_or_default().iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let takes = argument.get_action().takes_values();
        let shown = match argument.get_long() {
            Some(long) if takes => format!("--{long} {value}"),
            Some(long) => format!("--{long}"),
            None => value,
        };
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        writeln!(page, ".TP\n\\fB{}\\fR\n{}", escaped(&shown), escaped(&sentence(&help)))?;
    }
    for below in command.get_subcommands().filter(|below| below.get_name() != "help") {
        describe(page, below, &format!("{name} {}", below.get_name()))?;
    }
    Ok(())
}

fn sentence(text: &str) -> String {
    let text = text.trim().replace('\n', " ");
    if text.is_empty() || text.ends_with(['.', '!', '?']) { text } else { format!("{text}.") }
}

/// The rows of the README's table: names, default, meaning.
fn settings() -> impl Iterator<Item = (String, String, String)> {
    let table = README.split("| setting | default | what it is |").nth(1).unwrap_or_default();
    let rows = table.lines().skip(2).take_while(|line| line.starts_with("| "));
    rows.filter_map(|row| {
        let mut cells = row.trim_matches('|').split(" | ").map(plain);
        Some((cells.next()?, cells.next()?, cells.next()?))
    })
}

/// Markdown without its marks; of a link, its text.
fn plain(cell: &str) -> String {
    let mut text = cell.trim().trim_end_matches('|').trim().replace(['`', '*'], "");
    while let Some((before, rest)) = text.split_once('[') {
        let Some((shown, rest)) = rest.split_once("](") else { break };
        let Some((_, after)) = rest.split_once(')') else { break };
        text = format!("{before}{shown}{after}");
    }
    text
}

/// For roff: dashes that can be copied, no escapes, no lines that begin as a request does.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}
