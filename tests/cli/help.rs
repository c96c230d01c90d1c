//! Help texts, completions and manual pages.

use std::path::Path;

use clap::CommandFactory as _;
use journeyman::cli::Cli;

use crate::cli::support::{beside, golden, journeyman, run};

/// The words of every command.
fn commands() -> Vec<Vec<String>> {
    let (mut pending, mut found) = (vec![(Vec::new(), Cli::command())], Vec::new());
    while let Some((words, command)) = pending.pop() {
        for inner in command.get_subcommands() {
            pending.push(([words.as_slice(), &[inner.get_name().to_owned()]].concat(), inner.clone()));
        }
        found.push(words);
    }
    found
}

#[test]
fn the_help_of_every_command_is_printed_and_that_of_the_main_ones_is_as_reviewed() {
    let mut root = Cli::command();
    root.build();
    for words in commands() {
        let command = words.iter().fold(&mut root, |outer, word| outer.find_subcommand_mut(word).expect("a command"));
        let help = command.render_long_help().to_string();
        assert!(help.contains(&format!("Usage: {}", ["journeyman", &words.join(" ")].join(" ").trim())), "{help}");
    }
    for (name, words) in
        [("journeyman", &[][..]), ("worker", &["worker"]), ("dev", &["dev"]), ("task-create", &["task", "create"])]
    {
        let said = run(journeyman(Path::new("/")).args(words).arg("--help"), "");
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{words:?}");
        golden(&beside("help").join(format!("{name}.txt")), &said.out);
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
    for words in commands() {
        let name = [&["journeyman".to_owned()], words.as_slice()].concat().join("-");
        let path = pages.join(format!("{name}.1"));
        let page = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(&format!(".TH {name} 1")) && page.contains(".SH SYNOPSIS"), "{name}: {page}");
        // Not every host has man.
        let mut man = std::process::Command::new("man");
        if let Ok(read) = man.args(["--warnings", "-l"]).arg(&path).env("LC_ALL", "C.UTF-8").output() {
            let complaints = String::from_utf8_lossy(&read.stderr).into_owned();
            assert!(read.status.success() && complaints.is_empty(), "{name}: {complaints}");
        }
    }
}

#[test]
fn a_closed_pipe_is_not_a_failure() {
    let mut command = journeyman(Path::new("/"));
    command.args(["config", "schema"]).stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("the binary ends");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));
}
