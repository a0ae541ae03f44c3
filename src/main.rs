//! The binary: nothing but the call.

use std::process::ExitCode;

use gitea_dynamic_runner::backend::local;

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    match args.next().as_ref().and_then(|arg| arg.to_str()) {
        // Before any thread: these choose namespaces for themselves.
        Some("local-keeper") => local::keeper_main(args.collect()),
        Some("local-init") => local::init_main(args.collect()),
        _ => ExitCode::SUCCESS,
    }
}
