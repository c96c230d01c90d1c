//! The termination file.

use jiff::{SignedDuration, Timestamp};
use journeyman_domain::termination_notice::Termination;
use journeyman_platform::host::termination_notice::{Notice, NoticeOrigin};

use crate::host::notice_watch::{Watched, assert_about, is_failing};
use crate::host::termination::replace;

const SOON: Notice = Notice { origin: NoticeOrigin::File, termination: Termination::Soon };

#[tokio::test]
async fn a_new_file_is_a_notice_and_so_is_an_earlier_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    let mut watched = Watched::file(path.clone());
    for seconds in [90, 40] {
        let time = Timestamp::now() + SignedDuration::from_secs(seconds);
        replace(&path, format!("{time}\n"));
        assert_about(watched.next_in_seconds().await, seconds as f64);
    }
}

#[tokio::test]
async fn an_empty_file_means_at_once_and_so_does_one_without_a_time() {
    for content in [&b""[..], b"\n", b"tomorrow", b"2030-01-31T1", b"\0\0", b"\xff\xfe"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("terminate-at");
        replace(&path, content);
        assert_eq!(Watched::file(path).next().await, SOON, "{content:?}");
    }
}

#[tokio::test]
async fn a_directory_at_the_files_path_is_no_notice_and_a_later_file_is() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    std::fs::create_dir(&path).expect("it can be made");
    let mut watched = Watched::file(path.clone());
    // The status shows that a notice could be missed.
    let seen = watched.wait_for_status(is_failing).await;
    assert!(seen.error.is_some_and(|error| error.contains("not a regular file")));
    watched.assert_no_more_notices();
    std::fs::remove_dir(&path).expect("it can be removed");
    std::fs::write(&path, "").expect("it can be written");
    assert_eq!(watched.next().await, SOON);
}
