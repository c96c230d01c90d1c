//! What commands print: a file of `tests/observe/texts` for each state of a worker and a controller.

use journeyman::console::{controller, text, worker};
use journeyman::control::controller_api::Inventories;
use journeyman::worker::status::ClaimDetail;
use serde_json::json;

use crate::observe::{groups, orders, views};

/// `UPDATE_GOLDEN=1` writes the file.
fn golden(name: &str, text: &str) {
    let mut pieces = text.split('\x1b');
    let first = pieces.next().unwrap_or_default().to_owned();
    let plain = pieces.fold(first, |plain, piece| plain + piece.split_once('m').expect("a color").1);
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/observe/texts/{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        return std::fs::write(&path, plain).expect("it can be written");
    }
    assert_eq!(plain, std::fs::read_to_string(&path).unwrap_or_default(), "{} differs", path.display());
}

#[test]
fn the_status_of_each_state_says_what_happens_and_why_nothing_does() {
    for (word, status) in views::all() {
        golden(&format!("worker-{word}"), &text::report(&worker::report(&status, &[])));
    }
    for (word, status) in [("busy", groups::busy()), ("failing", groups::failing()), ("standby", groups::standby())] {
        golden(&format!("controller-{word}"), &text::report(&controller::report(&status)));
    }
}

#[test]
fn a_claim_is_shown_with_its_lease_processes_and_phases() {
    let detail: ClaimDetail = serde_json::from_value(json!({
        "task": "fN1SbArXTPSVFNUvaOlinQ", "run": 0, "name": "a\u{1b}[2Jb", "source": "ci", "state": "running", "progress": "63 %",
        "held_seconds": 201.0, "lease_left_seconds": 21.0, "lease_seconds": 1200.0, "reclaimed_seconds_ago": 60.0,
        "log_bytes": 2_345_678, "source_description": "prov/linux at tc.example.com", "handler": "command", "dequeue_count": 2,
        "reclaims": 3, "reclaim_in_seconds": 7.0, "containment": "group", "processes": (1..=22).collect::<Vec<_>>(),
        "phases": [
            { "phase": "prepare", "seconds_ago": 200.0, "duration_seconds": 0.0125 },
            { "phase": "run", "seconds_ago": 199.0, "duration_seconds": null },
        ],
        "last_command": { "command": "release", "note": { "by": "ana", "text": "kernel update" }, "seconds_ago": 2.0 },
    }))
    .expect("a claim");
    golden("claim", &text::facts(&worker::claim(&detail)));
}

#[test]
fn the_poison_queue_shows_the_worker_its_exit_and_its_log_without_the_body() {
    let found: Inventories = serde_json::from_value(json!({ "core": orders::put_aside() })).expect("an inventory");
    golden("poison-list", &text::table(&controller::poison(&found)));
    golden("poison-show", &text::facts(&controller::poisoned(&found["core"].requests[0])));
}
