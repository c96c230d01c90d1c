//! The built binary: a worker that is watched over HTTP while it runs a task.

use crate::cli::server::{dev, fifo};
use crate::cli::support::{journeyman, run};
use crate::observe::numbers::documented;
use crate::observe::task;
use crate::support::http::get;

#[tokio::test]
async fn a_running_task_is_visible_over_http_and_its_handler_gets_the_trace() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    let mut dev = dev(here, &["--set", "http.listen=127.0.0.1:0", "--set", "host.min_free_disk=1MiB"]);
    let line = dev.logs("http://");
    let address = line.split("http://").nth(1).and_then(|rest| rest.split('/').next()).expect("an address");
    let go = fifo(here.join("go"));
    let script = format!("echo parent=$TRACEPARENT; cat {}", go.display());
    let created = task(here, &["create", "--", "/bin/sh", "-c", &script]).out;
    let id = created.split_whitespace().next().expect("the id").to_owned();
    let claimed = dev.logs("claimed");
    let trace = claimed.split("trace_id=").nth(1).expect("the line names the trace").trim();
    assert_eq!(trace.len(), 32, "{claimed}");

    let page = get(address, "/").await.body;
    assert!(page.contains(&format!("{id}/0")) && page.contains("lease left"), "{page}");
    let metrics = get(address, "/metrics").await.body;
    assert!(metrics.contains("journeyman_tasks_running{source=\"command\"} 1.0"), "{metrics}");
    assert!(metrics.contains("journeyman_lease_remaining_min_seconds"), "{metrics}");
    let unknown: Vec<_> = crate::observe::numbers::names(&metrics).difference(&documented()).cloned().collect();
    assert_eq!(unknown, Vec::<String>::new());
    assert_eq!(get(address, "/readyz").await.status, 200);
    assert_eq!(run(journeyman(here).arg("pause"), "").code, 0);
    assert_eq!(get(address, "/readyz").await.status, 503);
    assert_eq!(get(address, "/livez").await.status, 200);

    std::fs::write(go, "go\n").expect("the task reads");
    let reported = dev.logs("reported");
    assert!(reported.contains(trace), "{reported}");
    let metrics = get(address, "/metrics").await.body;
    assert!(metrics.contains("journeyman_tasks_total{source=\"command\",outcome=\"completed\"} 1.0"), "{metrics}");
    let log = task(here, &["log", &id]).out;
    assert!(log.contains(&format!("parent=00-{trace}-")), "{log}");
}
