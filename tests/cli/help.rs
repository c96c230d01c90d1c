//! Help texts, completions and what is said to a mistyped command.

use std::path::Path;

use clap::CommandFactory as _;
use journeyman::cli::Cli;

use crate::support::{beside, golden, journeyman, run};

#[test]
fn every_help_text_is_as_written_down() {
    let mut left = vec![(Vec::new(), Cli::command())];
    while let Some((words, command)) = left.pop() {
        for inner in command.get_subcommands() {
            left.push(([words.as_slice(), &[inner.get_name().to_owned()]].concat(), inner.clone()));
        }
        let said = run(journeyman(Path::new("/")).args(&words).arg("--help"), "");
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
fn manual_pages_exist_for_every_command_and_are_read_by_man() {
    let folder = tempfile::tempdir().expect("a folder");
    let pages = folder.path().join("man1");
    let said = run(journeyman(folder.path()).arg("man").arg(&pages), "");
    assert_eq!((said.code, said.err.as_str()), (0, ""));
    for help in std::fs::read_dir(beside("help")).expect("it is there") {
        let help = help.expect("it can be read").path();
        let command = help.file_stem().and_then(|name| name.to_str()).expect("a name");
        let name = if command == "journeyman" { command.to_owned() } else { format!("journeyman-{command}") };
        let path = pages.join(format!("{name}.1"));
        let page = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(&format!(".TH {name} 1")) && page.contains(".SH SYNOPSIS"), "{name}: {page}");
        // Where there is no man there is nobody to read them.
        let mut man = std::process::Command::new("man");
        if let Ok(read) = man.args(["--warnings", "-l"]).arg(&path).env("LC_ALL", "C.UTF-8").output() {
            let complaints = String::from_utf8_lossy(&read.stderr).into_owned();
            assert!(read.status.success() && complaints.is_empty(), "{name}: {complaints}");
        }
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
