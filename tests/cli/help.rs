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
        &["worker"],
        &["run"],
        &["status"],
        &["pause"],
        &["resume"],
        &["drain"],
        &["stop"],
        &["reload"],
        &["tasks"],
        &["tasks", "ls"],
        &["tasks", "logs"],
        &["queue"],
        &["dev"],
        &["handler"],
        &["handler", "schema"],
        &["handler", "test"],
        &["task"],
        &["task", "create"],
        &["task", "status"],
        &["task", "wait"],
        &["task", "log"],
        &["task", "cancel"],
        &["task", "list"],
    ] {
        let said = run(journeyman(Path::new("/")).args(words).arg("--help"), "");
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{words:?}");
        let name = if words.is_empty() { "journeyman".to_owned() } else { words.join("-") };
        golden(&beside("help").join(format!("{name}.txt")), &said.out);
    }
}

#[test]
fn a_mistyped_command_is_answered_with_the_nearest() {
    for (typed, meant) in [
        ("confg", "config"),
        ("completion", "completions"),
        ("wroker", "worker"),
        ("que", "queue"),
        ("statu", "status"),
    ] {
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

#[test]
fn every_flag_of_a_long_running_command_names_its_variable_and_its_built_in_value() {
    for command in ["worker", "queue", "dev"] {
        let said = run(journeyman(Path::new("/")).args([command, "--help"]), "");
        let settings = said.out.split("Configuration:").nth(1).expect("the flags that set keys have a heading");
        let settings = settings.split_whitespace().collect::<Vec<_>>().join(" ");
        let flags = settings.matches("--").count();
        assert!(flags >= 4, "{command}");
        assert_eq!(settings.matches("[env: JOURNEYMAN__").count(), flags, "{command}");
        assert_eq!(settings.matches("[default: ").count(), flags, "{command}");
    }
}
