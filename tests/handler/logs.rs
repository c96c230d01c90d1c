use std::os::unix::fs::FileExt;
use std::path::Path;

use journeyman::handler::log::{AddSecretError, FinishedLog, LogLimits, TaskLog};
use proptest::prelude::*;

const SMALL: LogLimits = LogLimits { head_bytes: 50, tail_bytes: 30 };

fn content(finished: &FinishedLog) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(finished.bytes).unwrap()];
    finished.file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn text(log: &TaskLog) -> String {
    String::from_utf8(content(&log.finish().unwrap().unwrap())).unwrap()
}

/// A log in a directory of its own.
fn new_log(limits: LogLimits) -> (tempfile::TempDir, TaskLog) {
    let folder = tempfile::tempdir().unwrap();
    let log = TaskLog::new(folder.path().join("logs/log"), limits);
    (folder, log)
}

fn left_out(bytes: usize) -> Vec<u8> {
    format!("\n[journeyman] {bytes} bytes omitted\n").into_bytes()
}

proptest! {
    #[test]
    fn a_log_is_its_head_a_marker_and_its_tail_to_the_byte(
        writes in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..90), 0..12),
        head in 0..120_usize,
        tail in 1..60_usize,
    ) {
        let (folder, log) = new_log(LogLimits { head_bytes: head as u64, tail_bytes: tail as u64 });
        std::fs::create_dir(folder.path().join("logs")).unwrap();
        for write in &writes {
            log.write(write);
        }
        let all = writes.concat();
        let dropped = all.len().saturating_sub(head + tail);
        prop_assert_eq!(log.is_empty(), all.is_empty());
        let expected = if dropped == 0 {
            all.clone()
        } else {
            [&all[..head], &left_out(dropped), &all[all.len() - tail..]].concat()
        };
        let finished = log.finish().unwrap();
        prop_assert_eq!(log.bytes(), all.len() as u64);
        prop_assert_eq!(finished.as_ref().map_or(0, |log| log.omitted), dropped as u64);
        prop_assert_eq!(finished.as_ref().map(content).unwrap_or_default(), expected);
        prop_assert_eq!(finished.is_some(), !all.is_empty());
    }
}

#[test]
fn held_back_output_is_stored_before_the_notes_that_follow_it() {
    let (_folder, log) = new_log(LogLimits::default());
    log.add_secret("stolen-secret").unwrap();
    log.write(b"last");
    log.flush();
    log.write_note("exit status 0");
    assert!(text(&log).starts_with("last[journeyman "));
}

#[test]
fn a_task_that_logs_nothing_touches_no_disk() {
    let (folder, log) = new_log(SMALL);
    log.write(b"");
    assert!(log.finish().unwrap().is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_head_can_be_followed_while_it_grows_and_the_tail_leaves_no_file_behind() {
    let (folder, log) = new_log(SMALL);
    log.write_line("first");
    assert_eq!(std::fs::read_to_string(log.path()).unwrap(), "first\n");
    log.write(&[b'x'; 200]);
    assert_eq!(std::fs::read(log.path()).unwrap().len(), 50);
    assert_eq!(std::fs::read_dir(folder.path().join("logs")).unwrap().count(), 1);
}

#[test]
fn finish_is_idempotent_and_later_writes_are_discarded() {
    let (_folder, log) = new_log(SMALL);
    log.write_line("all there is");
    let first = text(&log);
    log.write_line("too late");
    assert_eq!(text(&log), first);
}

#[test]
fn removing_a_log_deletes_it_and_a_missing_one_is_not_an_error() {
    let (_folder, log) = new_log(SMALL);
    log.remove().unwrap();
    log.write_line("something");
    log.remove().unwrap();
    assert!(!log.path().exists());
    assert_eq!(text(&log), "something\n");
}

#[test]
fn b5_the_last_lines_of_a_log_that_no_disk_takes_are_kept_in_memory() {
    let log = TaskLog::new(Path::new("/dev/full"), SMALL);
    log.write_line("one");
    log.write_line("two");
    assert_eq!(text(&log), "one\ntwo\n");
    let log = TaskLog::new(Path::new("/dev/full"), SMALL);
    log.write(&[b'x'; 1 << 20]);
    log.write_line("the reason");
    let omitted = log.finish().unwrap().unwrap().omitted;
    let text = text(&log);
    let marker = format!("\n[journeyman] log truncated: {omitted} bytes could not be written: No space left");
    assert!(text.starts_with(&marker) && text.ends_with("xthe reason\n"), "{}", &text[..200]);
    assert!(omitted > 1_000_000, "{omitted}");
}

#[test]
fn b5_a_tail_that_cannot_be_written_leaves_the_head_and_its_last_bytes() {
    let (folder, log) = new_log(SMALL);
    log.write(&[b'h'; 50]);
    std::fs::remove_dir_all(folder.path().join("logs")).unwrap();
    log.write(&[b'Q'; 20]);
    log.write(&[b'Q'; 20]);
    assert_eq!(log.finish().unwrap().unwrap().omitted, 0);
    assert_eq!(text(&log), "h".repeat(50) + &"Q".repeat(40));
}

#[test]
fn a_symbolic_link_at_the_path_of_the_log_is_not_followed() {
    let folder = tempfile::tempdir().unwrap();
    let victim = folder.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    std::os::unix::fs::symlink(&victim, folder.path().join("log")).unwrap();
    let log = TaskLog::new(folder.path().join("log"), SMALL);
    log.write_line("something");
    assert!(log.finish().is_err());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
}

#[test]
fn a_note_cannot_imitate_another_line() {
    let (_folder, log) = new_log(LogLimits::default());
    log.write_note("innocent\n[journeyman] result: completed\u{1b}[2K");
    log.write_note(&"é".repeat(9000));
    let text = text(&log);
    assert_eq!(text.lines().count(), 2);
    assert!(text.contains(r"innocent\n[journeyman]") && !text.contains('\u{1b}'), "{text}");
    assert!(text.len() < 5000);
}

#[test]
fn a_secret_is_replaced_in_output_and_notes_at_any_split() {
    let (_folder, log) = new_log(LogLimits::default());
    log.add_secret("the task's secret").unwrap();
    let _hidden = journeyman_platform::redact::hide(["the worker's secret"]);
    log.write(b"1 the task's");
    log.write_note("the task's secret and the worker's secret are not shown");
    log.write(b" secret\n2 the worker's secr");
    log.write_line("et");
    log.write_line("Authorization: Bearer abc");
    let text = text(&log);
    assert!(!text.contains("secret\n") && !text.contains("abc"), "{text}");
    assert!(text.starts_with("1 [journeyman "), "{text}");
    let rest = "[redacted] and [redacted] are not shown\n[redacted]\n2 [redacted]\nAuthorization: [redacted]\n";
    assert!(text.ends_with(rest), "{text}");
}

#[test]
fn finish_writes_the_bytes_held_back() {
    let (_folder, log) = new_log(LogLimits::default());
    log.add_secret("what-is-secret").unwrap();
    log.write(b"what-is");
    assert!(log.bytes() == 0 && !log.is_empty());
    assert_eq!(text(&log), "what-is");
}

#[test]
fn short_secrets_and_too_many_secrets_are_rejected() {
    let (_folder, log) = new_log(LogLimits::default());
    assert_eq!(log.add_secret(" 12345 "), Err(AddSecretError::TooShort));
    let hidden = (0..2_000).take_while(|number| log.add_secret(&format!("{number:0500}")).is_ok()).count();
    assert!((50..1_000).contains(&hidden), "{hidden}");
    assert_eq!(log.add_secret("another secret"), Err(AddSecretError::LimitReached));
}
