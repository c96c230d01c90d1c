//! `/metrics`, read by the parser of Prometheus' own Python client.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::process::{Command, Stdio};

use journeyman::console::openmetrics;
use journeyman::console::worker::metrics;
use journeyman::control::WorkerStatusReply;

use crate::observe::views::{self, Server};
use crate::support::needs;

/// Reads OpenMetrics and prints each sample as `name{label="value",…} value`, labels in order.
const READER: &str = r#"
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read
for family in read(sys.stdin.read()):
    assert family.documentation.strip(), family.name
    assert family.type in ("gauge", "counter", "histogram", "info"), (family.name, family.type)
    for sample in family.samples:
        labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
        print(f"{sample.name}{{{labels}}} {sample.value}")
"#;

fn text(status: &WorkerStatusReply) -> String {
    openmetrics::text(&metrics(status))
}

/// The table of `examples/prometheus/README.md`.
pub(crate) fn markdown() -> String {
    openmetrics::markdown(&metrics(&views::idle()))
}

fn read(python: &str, text: &str) -> Result<Vec<String>, String> {
    let mut child = Command::new(python)
        .args(["-c", READER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python starts");
    child.stdin.take().expect("it is piped").write_all(text.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(String::from_utf8(output.stdout).expect("UTF-8").lines().map(str::to_owned).collect())
}

/// The names of every series that the text holds.
pub(crate) fn names(text: &str) -> BTreeSet<String> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let name = |line: &str| line.split(['{', ' ']).next().unwrap_or_default().to_owned();
    let of_histogram = |name: &str| {
        let family = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix))?;
        text.contains(&format!("# TYPE {family} histogram")).then(|| family.to_owned())
    };
    samples.map(name).map(|name| of_histogram(&name).unwrap_or(name)).collect()
}

/// The names of the table that the examples show.
pub(crate) fn documented() -> BTreeSet<String> {
    let rows = markdown();
    rows.lines().filter_map(|row| row.strip_prefix("| `")?.split('`').next().map(str::to_owned)).collect()
}

#[test]
fn the_reference_parser_reads_the_metrics_of_every_state() {
    let Some(python) = needs("JOURNEYMAN_TEST_METRICS_PYTHON") else { return };
    for (word, status) in views::all() {
        let text = text(&status);
        let samples = read(&python, &text).unwrap_or_else(|error| panic!("{word}: {error}\n{text}"));
        assert!(samples.len() > 60, "{word}: {samples:#?}");
    }
    let broken = text(&views::idle()).replace("# EOF", "");
    assert!(read(&python, &broken).is_err(), "the parser accepts anything");
}

#[test]
fn samples_match_the_status() {
    let text = text(&views::draining());
    for sample in [
        r#"journeyman_build_info{version="0.3.0"} 1.0"#,
        r#"journeyman_worker_info{worker_id="ip-10-0-3-7-i-0abc",worker_group="eu-central-1",containment="cgroup-kill"} 1.0"#,
        r#"journeyman_state{state="draining"} 1.0"#,
        r#"journeyman_state{state="running"} 0.0"#,
        r#"journeyman_claiming_blocked{reason="stopping"} 1.0"#,
        r#"journeyman_tasks_running{source="ci"} 2.0"#,
        r#"journeyman_tasks_total{source="ci",outcome="completed"} 112.0"#,
        r#"journeyman_tasks_total{source="ci",outcome="exception",reason="malformed-payload"} 2.0"#,
        r#"journeyman_tasks_total{source="nightly",outcome="lost"} 0.0"#,
        r#"journeyman_claims_total{source="ci"} 123.0"#,
        "journeyman_lease_remaining_min_seconds 21.0",
        "journeyman_log_bytes_total 1080778858.0",
        "journeyman_termination_notices_total{provider=\"aws\"} 1.0",
        "journeyman_termination_notices_total{provider=\"file\"} 0.0",
        "journeyman_termination_notices_total{provider=\"other\"} 0.0",
        "journeyman_termination_reaction_seconds 3.5",
        r#"journeyman_config_reloads_total{result="applied"} 1.0"#,
        r#"journeyman_source_up{source="ci"} 1.0"#,
        "# UNIT journeyman_disk_free_bytes bytes",
        "journeyman_trace_spans_total{result=\"dropped\"} 2.0",
        "# EOF",
    ] {
        assert!(text.lines().any(|line| line == sample), "{sample} is missing in\n{text}");
    }
    let text = self::text(&views::troubled());
    assert!(text.contains("journeyman_source_up{source=\"ci\"} 0.0"), "{text}");
    assert!(
        !names(&text).contains("journeyman_lease_remaining_min_seconds"),
        "no lease is held, which is not a lease of no length: {text}"
    );
}

#[test]
fn e4_the_times_of_tasks_are_histograms() {
    let text = text(&views::idle());
    for end in [
        "_bucket{source=\"ci\",phase=\"queue\",outcome=\"completed\",le=\"0.01\"} 0.0",
        "_bucket{source=\"nightly\",phase=\"report\",outcome=\"lost\",le=\"+Inf\"} 0.0",
        "_count{source=\"ci\",phase=\"run\",outcome=\"failed\"} 0.0",
        "_sum{source=\"ci\",phase=\"store\",outcome=\"exception\"} 0.0",
    ] {
        assert!(text.contains(&format!("journeyman_task_phase_seconds{end}\n")), "{end}");
    }
}

#[test]
fn exactly_the_existing_metrics_are_documented() {
    // Between them they hold everything that may be absent.
    let mut seen = names(&text(&views::draining()));
    seen.extend(names(&text(&views::running())));
    assert_eq!(seen, documented());
}

#[tokio::test]
async fn metrics_are_served_as_openmetrics() {
    let server = Server::start(views::running()).await;
    let answer = crate::support::http::get(server.address, "/metrics").await;
    assert_eq!(answer.status, 200);
    assert!(answer.head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert_eq!(answer.body, text(&views::running()));
}
