//! The examples that build on the metrics: every expression names metrics and labels that exist.

use std::collections::BTreeSet;
use std::path::Path;

use crate::observe::numbers::{documented, markdown};

fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words of an expression that name a metric of ours.
fn named(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|char: char| !char.is_ascii_alphanumeric() && char != '_');
    words.filter(|word| word.starts_with("journeyman_")).map(str::to_owned).collect()
}

/// The labels that an expression matches.
fn labels(expression: &str) -> impl Iterator<Item = &str> {
    let matchers = expression.split('{').skip(1).filter_map(|rest| rest.split('}').next());
    let pairs = matchers.flat_map(|inside| inside.split(',')).filter_map(|pair| pair.split_once('='));
    pairs.map(|(label, _)| label.trim_end_matches('!').trim())
}

fn assert_known(expression: &str) {
    let names = named(expression);
    assert!(!names.is_empty(), "no metric of ours: {expression}");
    let documented = documented();
    let unknown: Vec<_> = names.difference(&documented).collect();
    assert!(unknown.is_empty(), "{unknown:?} in {expression}");
    let table = markdown();
    for label in labels(expression) {
        let ours = names.iter().any(|name| {
            let row = table.lines().find(|row| row.contains(&format!("`{name}`"))).expect("it is documented");
            row.contains(&format!("`{label}`"))
        });
        assert!(ours || ["job", "instance"].contains(&label), "no label {label} in {expression}");
    }
}

#[test]
fn the_alerts_use_metrics_that_exist() {
    let text = example("prometheus/alerts.yml");
    let expressions: Vec<&str> = text.lines().filter_map(|line| line.trim_start().strip_prefix("expr: ")).collect();
    assert_eq!(expressions.len(), text.matches("- alert: ").count());
    expressions.into_iter().for_each(assert_known);
}

/// `promtool` understands more than this file does; where there is one, it is asked, and runs `alerts.test.yml`.
#[test]
fn promtool_accepts_the_rules_and_their_tests() {
    let tool = std::env::var("JOURNEYMAN_TEST_PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let there = std::process::Command::new(&tool).arg("--version").output();
    assert!(there.is_ok() || std::env::var("CI").as_deref() != Ok("true"), "CI=true, and there is no promtool");
    if let Err(error) = there {
        return eprintln!(
            "NOT TESTED: there is no promtool ({error}); expressions were checked by the names in them only"
        );
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rules = ["check", "rules", "examples/prometheus/alerts.yml"];
    let cases = ["test", "rules", "tests/observe/alerts.test.yml"];
    for arguments in [rules, cases] {
        let output = std::process::Command::new(&tool).args(arguments).current_dir(root).output().expect("it runs");
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}

#[test]
fn the_board_shows_metrics_that_exist() {
    let board: serde_json::Value = serde_json::from_str(&example("grafana/journeyman.json")).expect("JSON");
    let mut expressions = Vec::new();
    collect(&board, &mut expressions);
    assert!(expressions.len() >= 12, "{expressions:?}");
    for expression in &expressions {
        assert_known(&expression.replace("$__rate_interval", "5m"));
    }
    let panels = board["panels"].as_array().expect("panels");
    let ids: BTreeSet<_> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "ids differ");
    let shown: BTreeSet<String> = expressions.iter().flat_map(|expression| named(expression)).collect();
    for must in [
        "journeyman_lease_remaining_min_seconds",
        "journeyman_claiming_blocked",
        "journeyman_source_up",
        "journeyman_tasks_total",
    ] {
        assert!(shown.contains(must), "{must}");
    }
}

fn collect(value: &serde_json::Value, expressions: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(entries) => {
            for (key, value) in entries {
                match value.as_str() {
                    Some(text) if key == "expr" => expressions.push(text.to_owned()),
                    _ => collect(value, expressions),
                }
            }
        }
        serde_json::Value::Array(items) => items.iter().for_each(|item| collect(item, expressions)),
        serde_json::Value::Null
        | serde_json::Value::Bool(_)
        | serde_json::Value::Number(_)
        | serde_json::Value::String(_) => {}
    }
}

#[test]
fn the_table_of_metrics_is_the_one_in_the_examples() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/prometheus/README.md");
    let text = std::fs::read_to_string(&path).expect("it is there");
    let (begin, end) = ("<!-- metrics: begin -->\n", "<!-- metrics: end -->");
    let (before, rest) = text.split_once(begin).expect("it begins");
    let (table, after) = rest.split_once(end).expect("it ends");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        return std::fs::write(&path, format!("{before}{begin}{}{end}{after}", markdown())).expect("it can be written");
    }
    assert_eq!(table, markdown(), "UPDATE_GOLDEN=1 writes it anew");
}
