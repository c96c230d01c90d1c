//! The notice file.

use jiff::{SignedDuration, Timestamp};
use journeyman::domain::termination_notice::Termination;
use journeyman::host::termination_notice::{Notice, NoticeOrigin, WatchHealth};

use crate::watched::{Watched, about};

const SOON: Notice = Notice { origin: NoticeOrigin::File, termination: Termination::Soon };

#[tokio::test]
async fn a_file_that_appears_says_when_the_host_goes_and_an_earlier_time_is_news() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    let mut watched = Watched::file(path.clone());
    let time = |seconds| format!("{}\n", Timestamp::now() + SignedDuration::from_secs(seconds));
    std::fs::write(&path, time(90)).expect("it can be written");
    about(watched.goes_in().await, 90.0);
    std::fs::write(&path, time(40)).expect("it can be written");
    about(watched.goes_in().await, 40.0);
}

#[tokio::test]
async fn an_empty_file_is_an_order_to_go_and_so_is_one_that_holds_no_time() {
    for content in ["", "\n", "tomorrow", "\u{0}\u{0}"] {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("terminate-at");
        std::fs::write(&path, content).expect("it can be written");
        assert_eq!(Watched::file(path).next().await, SOON, "{content:?}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    std::fs::write(&path, [0xff, 0xfe]).expect("it can be written");
    assert_eq!(Watched::file(path).next().await, SOON);
}

#[tokio::test]
async fn a_folder_in_the_place_of_the_file_orders_nothing_and_the_file_is_heeded_when_it_comes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("terminate-at");
    std::fs::create_dir(&path).expect("it can be made");
    let mut watched = Watched::file(path.clone());
    // Whoever looks sees that a notice could not be heard, and for how long.
    let seen = watched.seen(|sight| matches!(sight.health, WatchHealth::Failing(_))).await;
    assert!(matches!(seen.health, WatchHealth::Failing(why) if why.contains("it is no regular file")));
    watched.said_nothing_more();
    std::fs::remove_dir(&path).expect("it can be removed");
    std::fs::write(&path, "").expect("it can be written");
    assert_eq!(watched.next().await, SOON);
}
