//! `examples/worker-groups/demo` on a real broker.

use std::path::Path;
use std::process::Command;

use super::Pool;
use crate::amqp::support::TEST_TIMEOUT;

#[tokio::test(flavor = "multi_thread")]
async fn the_example_of_worker_groups_gets_a_reply_to_every_call_and_leaves_no_process() {
    let Some(pool) = Pool::new().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut demo = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/worker-groups/demo"));
    demo.env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default()).env("TMPDIR", folder.path());
    demo.env("JOURNEYMAN", env!("CARGO_BIN_EXE_journeyman")).env("JOURNEYMAN_AMQP_URI", &pool.uri);
    demo.env("POOL", &pool.name).env("JOURNEYMAN__HOST__METADATA_SERVICE", "off");
    let running = tokio::task::spawn_blocking(move || demo.output().expect("the demo starts"));
    let output = tokio::time::timeout(3 * TEST_TIMEOUT, running).await.expect("the demo ends").expect("no panic");
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{out}{err}");
    for (key, replies) in [("42", 3), ("busy", 6), ("infra%3D7%20%C3%BC", 1)] {
        assert_eq!(out.matches(&format!("\"key\":\"{key}\"")).count(), replies, "{key}: {out}{err}");
    }
    assert_eq!(pool.depth(&format!("{}-req-busy", pool.name)).await, None, "{out}{err}");
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "{out}{err}");
}
