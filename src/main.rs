//! From arguments to an exit code; everything else is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    journeyman::shim();
    let environment = journeyman::config::Environment::from_process();
    journeyman::cli::run(std::env::args_os().collect(), &environment).into()
}
