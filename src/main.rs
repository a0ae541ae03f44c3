//! The binary: nothing but the call.

use std::process::ExitCode;

fn main() -> ExitCode {
    gitea_dynamic_runner::cli::main()
}
