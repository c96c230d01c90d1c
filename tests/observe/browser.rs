//! The status page in a browser: headless Chromium, with scripts and without.

use crate::observe::views::{self, Server};
use crate::support::headless::{Scripts, chromium, dom};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_scripts_the_page_refreshes_and_escapes_what_tasks_say() {
    let Some(chromium) = chromium() else { return };
    let server = Server::start(views::running()).await;
    let page = dom(&chromium, Scripts::On, &format!("http://{}/", server.address), 7_000).await;
    assert!(server.snapshots() >= 3, "every two seconds of its time: {}", server.snapshots());
    assert!(page.contains("<span id=\"state\" class=\"good\">live</span>"), "its own script runs: {page}");
    assert!(page.contains("<title>running 3/4"), "nothing else does: {page}");
    assert!(page.contains("&lt;script&gt;document.title"), "{page}");
    // Times in the reader's own zone are put in by the script, in what was fetched as well.
    assert!(!page.contains("Z\" title=\"20"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_an_exited_worker_shows_the_last_known_state() {
    let Some(chromium) = chromium() else { return };
    let server = Server::start(views::idle()).await;
    server.show_once(views::running());
    let page = dom(&chromium, Scripts::On, &format!("http://{}/", server.address), 9_000).await;
    assert!(page.contains("showing the last known state"), "{page}");
    assert!(page.contains("fN1SbArXTPSVFNUvaOlinQ/0"), "what was there stays: {page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_scripts_the_page_is_complete() {
    let Some(chromium) = chromium() else { return };
    let server = Server::start(views::paused()).await;
    let address = format!("http://{}/", server.address);
    let page = dom(&chromium, Scripts::Off, &address, 1_000).await;
    for part in ["not claiming: paused for 41m07s", "by ana", "kernel update", "journeyman resume"] {
        assert!(page.contains(part), "{part}: {page}");
    }
    assert!(page.contains("id=\"state\">as of "), "no script ran: {page}");
    assert!(page.contains("<noscript><meta http-equiv=\"refresh\" content=\"10\"></noscript>"), "{page}");
}
