//! Runs the command line of the library, and exits with its code.

use std::process::ExitCode;

/// A request or a task is some hundred small allocations, on several threads. A program that embeds the library chooses its own.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    journeyman::main().run()
}
