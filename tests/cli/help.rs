//! Help texts, completions and what is said to a mistyped command.

use std::path::Path;

use crate::support::{beside, golden, journeyman, run};

#[test]
fn every_help_text_is_as_written_down() {
    for words in [
        &[][..],
        &["config"],
        &["config", "init"],
        &["config", "check"],
        &["config", "show"],
        &["config", "schema"],
        &["completions"],
    ] {
        let said = run(journeyman(Path::new("/")).args(words).arg("--help"), "");
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{words:?}");
        let name = if words.is_empty() { "journeyman".to_owned() } else { words.join("-") };
        golden(&beside("help").join(format!("{name}.txt")), &said.out);
    }
}

#[test]
fn a_mistyped_command_is_answered_with_the_nearest() {
    for (typed, meant) in [("confg", "config"), ("completion", "completions")] {
        let said = run(journeyman(Path::new("/")).arg(typed), "");
        assert_eq!(said.code, 2, "{typed}");
        assert!(said.err.contains(&format!("'{meant}'")), "{typed}: {}", said.err);
    }
}

#[test]
fn completions_exist_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let said = run(journeyman(Path::new("/")).args(["completions", shell]), "");
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{shell}");
        assert!(said.out.contains("config") && said.out.len() > 500, "{shell}");
    }
}

#[test]
fn output_that_nobody_reads_is_no_failure() {
    let mut command = journeyman(Path::new("/"));
    command.args(["config", "schema"]).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the binary ends");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
