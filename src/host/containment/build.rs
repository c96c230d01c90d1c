//! The build script. It builds the small program that payloads start through, for the worker to carry along: see `shim.rs`.
//! Where that cannot be built the worker does without, and starts payloads through itself.

#![allow(
    clippy::disallowed_methods,
    reason = "cargo speaks to a build script through its environment, and nothing waits for it"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const OWN: &str = "src/host/containment/build.rs";
const SOURCE: &str = "src/host/containment/exec_shim.rs";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={OWN}");
    println!("cargo::rerun-if-changed={SOURCE}");
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let source = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join(SOURCE);
    let main = out.join("exec_shim.rs");
    let text = format!(
        "#[path = {source:?}]\nmod exec_shim;\nfn main() {{\n    \
         std::process::exit(exec_shim::run(std::env::args_os().skip(1)))\n}}\n"
    );
    std::fs::write(&main, text)?;
    let program = out.join("exec_shim");
    // Nothing of what it is made with must depend on how the worker itself is built.
    let mut compiler = Command::new(std::env::var("RUSTC")?);
    compiler.args(["--edition", "2024", "--crate-type", "bin", "--cap-lints", "allow"]);
    compiler.args(["--target", &std::env::var("TARGET")?]);
    for option in ["opt-level=s", "panic=abort", "lto=fat", "codegen-units=1", "strip=symbols"] {
        compiler.args(["-C", option]);
    }
    // No dynamic loader, and still at another address each time.
    compiler.args(["-C", "target-feature=+crt-static", "-C", "relocation-model=pic"]);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        compiler.arg("-C").arg(format!("linker={linker}"));
    }
    let output = compiler.arg("-o").arg(&program).arg(&main).output()?;
    if !output.status.success() {
        println!(
            "cargo::warning=payloads will start through the worker's own program, which takes longer: the small one"
        );
        println!("cargo::warning=could not be built, most likely since there is no static C library (glibc-static)");
        std::fs::write(&program, [])?;
    }
    Ok(())
}
