//! Runs the command line of the library, and exits with its code.

use std::process::ExitCode;

fn main() -> ExitCode {
    journeyman::shim();
    let environment = journeyman::config::Environment::from_process();
    journeyman::cli::run(std::env::args_os().collect(), &environment).into()
}
