//! The build script. It compiles the exec shim into a small static program that the library embeds, see `shim_launch.rs`, and
//! the patterns of secrets into one automaton, see `redact`.

#![allow(
    clippy::disallowed_methods,
    reason = "cargo passes its settings to a build script in environment variables, and the script may block"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use regex_automata::dfa::{StartKind, dense};
use regex_automata::util::syntax;

#[path = "../../redact/pattern_list.rs"]
mod pattern_list;

const BUILD_SCRIPT: &str = "host/containment/build.rs";
const SOURCE: &str = "host/containment/exec_shim.rs";
const PATTERN_LIST: &str = "redact/pattern_list.rs";

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed={BUILD_SCRIPT}");
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-changed={PATTERN_LIST}");
    match build_exec_shim().and_then(|()| build_patterns()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn build_exec_shim() -> Result<(), Box<dyn std::error::Error>> {
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let source = Path::new(&std::env::var("CARGO_MANIFEST_DIR")?).join(SOURCE);
    let main = out.join("main.rs");
    let text = format!(
        "#[path = {source:?}]\nmod exec_shim;\nfn main() {{\n    \
         std::process::exit(exec_shim::run(std::env::args_os().skip(1)))\n}}\n"
    );
    std::fs::write(&main, text)?;
    let program = out.join("exec_shim");
    // Fixed options, independent of the profile of the worker's own build.
    let mut compiler = Command::new(std::env::var("RUSTC")?);
    compiler.args(["--edition", "2024", "--crate-type", "bin", "--cap-lints", "allow"]);
    compiler.args(["--target", &std::env::var("TARGET")?]);
    for option in ["opt-level=s", "panic=abort", "lto=fat", "codegen-units=1", "strip=symbols"] {
        compiler.args(["-C", option]);
    }
    // Without a dynamic loader, and position independent.
    compiler.args(["-C", "target-feature=+crt-static", "-C", "relocation-model=pic"]);
    if let Ok(linker) = std::env::var("RUSTC_LINKER") {
        compiler.arg("-C").arg(format!("linker={linker}"));
    }
    let output = compiler.arg("-o").arg(&program).arg(&main).output()?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cannot build the exec shim; install a static C library (glibc-static): {error}").into());
    }
    println!("cargo::rustc-env=JOURNEYMAN_EXEC_SHIM={}", program.display());
    Ok(())
}

fn build_patterns() -> Result<(), Box<dyn std::error::Error>> {
    let dfa = dense::Builder::new()
        .configure(dense::Config::new().start_kind(StartKind::Anchored))
        .syntax(syntax::Config::new().unicode(false).utf8(false))
        .build_many(&pattern_list::PATTERNS.map(|(_, pattern)| pattern))?;
    let is_little = std::env::var("CARGO_CFG_TARGET_ENDIAN")? == "little";
    let (bytes, padding) = if is_little { dfa.to_bytes_little_endian() } else { dfa.to_bytes_big_endian() };
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("secret_patterns.dfa"), &bytes[padding..])?;
    Ok(())
}
