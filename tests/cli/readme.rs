//! README.md and the guide: their configurations load, their commands and links exist, and the first handler runs as written.

use std::collections::BTreeSet;
use std::path::Path;

use clap::{CommandFactory as _, Parser as _};
use journeyman::cli::Cli;
use journeyman::guide::{GuidePage, PAGES};
use rustix::process::Signal;

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::{Server, dev};
use crate::cli::support::{journeyman, run};

/// README.md, and every page of the guide.
fn pages() -> Vec<GuidePage> {
    let readme = GuidePage { name: "README.md", text: include_str!("../../README.md") };
    [readme].into_iter().chain(PAGES.iter().copied()).collect()
}

/// A block of code: what it is written in, and its lines.
struct Block {
    language: &'static str,
    text: &'static str,
}

fn blocks() -> Vec<Block> {
    let pieces = pages().into_iter().flat_map(|page| page.text.split("\n```").skip(1).step_by(2));
    pieces
        .map(|piece| {
            let (language, text) = piece.split_once('\n').expect("a block has a first line");
            Block { language, text }
        })
        .collect()
}

/// The words between single backticks.
fn spans() -> Vec<&'static str> {
    let outside = pages().into_iter().flat_map(|page| page.text.split("\n```").step_by(2));
    outside.flat_map(|text| text.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn every_configuration_in_the_pages_is_valid() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut seen = 0;
    for block in blocks().iter().filter(|block| block.language == "toml") {
        let mut command = journeyman(folder.path());
        // Some blocks show one section of a larger file.
        command.args(["config", "check", "--no-files", "--set", "handler.page.exec=/bin/true", "-"]);
        let said = run(&mut command, block.text);
        assert_eq!((said.code, said.err.as_str()), (0, ""), "{}", block.text);
        seen += 1;
    }
    assert!(seen >= 2, "only {seen} blocks of TOML were found");
}

#[test]
fn every_link_leads_to_a_file_and_every_page_is_linked() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut linked = BTreeSet::new();
    for page in pages() {
        let folder = if page.name == "README.md" { root.to_owned() } else { root.join("src/guide") };
        for link in page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if !link.starts_with("http") {
                let path = folder.join(link);
                assert!(path.exists(), "{} links to {link}, which is not there", page.name);
                linked.extend(path.file_stem().map(std::ffi::OsStr::to_owned));
            }
        }
    }
    for page in PAGES {
        assert!(linked.contains(std::ffi::OsStr::new(page.name)), "nothing links to the page {}", page.name);
    }
}

#[test]
fn the_payload_in_the_guide_fits_the_schema_of_command() {
    let block = blocks().into_iter().find(|block| block.language == "json").expect("a page shows a payload");
    let payload: serde_json::Value = serde_json::from_str(block.text).expect("it is JSON");
    let said = run(journeyman(Path::new("/")).args(["handler", "schema"]), "");
    let schema: serde_json::Value = serde_json::from_str(&said.out).expect("a schema is JSON");
    jsonschema::validate(&schema, &payload).expect("the payload fits");
}

/// The words of a line of shell, as far as README.md uses it: quotes, comments, and commands joined by `&&`.
fn commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut rest = line.trim_start();
    while !rest.is_empty() && !rest.starts_with('#') {
        let mut word = String::new();
        while let Some(next) = rest.chars().next().filter(|next| !next.is_whitespace()) {
            rest = &rest[next.len_utf8()..];
            if next == '\'' || next == '"' {
                let (quoted, after) = rest.split_once(next).expect("a quote is closed");
                word.push_str(quoted);
                rest = after;
            } else {
                word.push(next);
            }
        }
        rest = rest.trim_start();
        match (word.as_str(), commands.last_mut()) {
            ("&&", _) => commands.push(Vec::new()),
            (_, Some(command)) => command.push(word),
            (_, None) => {}
        }
    }
    commands
}

/// Every command of the pages' shell blocks that is this program, as its arguments.
fn invocations() -> Vec<Vec<String>> {
    let shell = blocks().into_iter().filter(|block| ["sh", "console"].contains(&block.language));
    let lines = shell.filter(|block| !block.text.starts_with("#!")).flat_map(|block| block.text.lines());
    let commands = lines.map(|line| line.trim_start_matches("$ ")).flat_map(commands);
    commands
        .filter_map(|words| match words.first()?.as_str() {
            "journeyman" => Some(words),
            "cargo" if words[1] == "run" && !words.contains(&"--example".to_owned()) => {
                let own = words.iter().position(|word| word == "--")?;
                Some([&["journeyman".to_owned()], &words[own + 1..]].concat())
            }
            _ => None,
        })
        .collect()
}

#[test]
fn every_command_in_the_pages_parses() {
    let invocations = invocations();
    assert!(invocations.len() >= 8, "only {} commands were found", invocations.len());
    for words in invocations {
        let arguments = words.iter().map(|word| if word == "TASK" { "XJOIQcqPRgykTZR_00-b1w" } else { word });
        if let Err(error) = Cli::try_parse_from(arguments) {
            panic!("a page says `{}`:\n{error}", words.join(" "));
        }
    }
}

#[test]
fn every_command_and_flag_that_the_pages_mention_exists() {
    let cli = Cli::command();
    let mut flags = BTreeSet::new();
    let mut folders = vec![&cli];
    while let Some(command) = folders.pop() {
        flags.extend(command.get_arguments().filter_map(clap::Arg::get_long));
        folders.extend(command.get_subcommands());
    }
    let (mut seen_commands, mut seen_flags) = (0, 0);
    for span in spans() {
        if let Some(rest) = span.strip_prefix("journeyman ") {
            let mut command = &cli;
            for word in rest.split_whitespace().take_while(|word| word.chars().all(|c| c.is_ascii_lowercase())) {
                if command.get_name() == "guide" {
                    assert!(PAGES.iter().any(|page| page.name == word), "there is no page `{span}`");
                    break;
                }
                command = command.find_subcommand(word).unwrap_or_else(|| panic!("there is no command `{span}`"));
                seen_commands += 1;
            }
        }
        if !span.starts_with("journeyman ") && !span.starts_with("--") {
            continue;
        }
        for flag in span.split_whitespace().filter_map(|word| word.strip_prefix("--")).filter(|flag| !flag.is_empty()) {
            let flag = flag.split('=').next().unwrap_or(flag);
            assert!(flags.contains(flag) || flag == "version", "no command has --{flag}, as in `{span}`");
            seen_flags += 1;
        }
    }
    assert!(seen_commands >= 6 && seen_flags >= 5, "{seen_commands} commands, {seen_flags} flags");
}

/// The first command of the pages with these words, without the name of the program.
fn invocation(words: &[&str]) -> Vec<String> {
    let found = invocations().into_iter().find(|found| words.iter().all(|word| found.iter().any(|w| w == word)));
    found.unwrap_or_else(|| panic!("no page has a command with {words:?}"))[1..].to_vec()
}

/// The first block of the pages with these words.
fn block(words: &str) -> &'static str {
    let found = blocks().into_iter().find(|block| block.text.contains(words));
    found.unwrap_or_else(|| panic!("no page has a block with {words:?}")).text
}

fn write_greet(folder: &Path) {
    let program = folder.join("greet.sh");
    std::fs::write(&program, block("echo \"hello $guest\"")).expect("it can be written");
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("it is ours");
}

#[test]
fn the_first_handler_of_the_readme_runs_with_the_commands_of_the_readme() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    write_greet(here);
    let serve = invocation(&["dev", "--handler"]);
    let server = dev(here, &serve[1..].iter().map(String::as_str).collect::<Vec<_>>());
    let tested = run(journeyman(here).args(invocation(&["handler", "test", "./greet.sh"])), "");
    assert!(tested.code == 0 && tested.out.contains("completes a good payload"), "{}{}", tested.out, tested.err);
    let create = run(journeyman(here).args(invocation(&["create", "--queue"])), "");
    assert_eq!(create.code, 0, "{}{}", create.out, create.err);
    let id = create.out.split_whitespace().next().expect("the id").to_owned();
    let mut log = invocation(&["task", "log"]);
    log.retain(|word| word != "TASK");
    let log = run(journeyman(here).args(&log).arg(&id), "");
    assert!(log.code == 0 && log.out.contains("hello world\n"), "{}{}", log.out, log.err);
    server.signal(Signal::INT);
    server.ends_with(0);
}

#[test]
fn the_same_handler_works_for_a_taskcluster_with_the_file_and_the_commands_of_the_guide() {
    let host = Host::with_queue();
    write_greet(host.path());
    host.write("token", TOKEN);
    let fleet = block("task_queue = \"build/greet\"").replace("http://127.0.0.1:7070", host.root());
    host.write("fleet.toml", &fleet);
    let worker = Server::start(journeyman(host.path()).args(invocation(&["worker", "fleet.toml"])));
    let mut create = journeyman(host.path());
    create.env("TASKCLUSTER_ROOT_URL", host.root()).env("TASKCLUSTER_CLIENT_ID", "me");
    let created = run(create.args(invocation(&["create", "build/greet"])), "");
    assert!(created.code == 0 && created.out.contains("completed"), "{}{}", created.out, created.err);
    worker.drain();
}
