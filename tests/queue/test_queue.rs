//! A queue for one test.

use std::time::Duration;

use journeyman_services::queue::{Config, Db, QueueClock, RegisteredClient, RunningQueue, start};
use tempfile::TempDir;

use super::client::{Api, http};

/// A queue with its clock and a client that has all scopes.
pub(crate) struct TestQueue {
    pub(crate) running: RunningQueue,
    pub(crate) clock: QueueClock,
    pub(crate) api: Api,
    pub(crate) folder: TempDir,
}

/// 2026-11-21T10:20:44.549Z, the time of most recordings.
pub(crate) const RECORDED: i64 = 1_795_256_444_549;

pub(crate) const ROOT: &str = "static/journeyman/root";
const TOKEN: &str = "a-token-of-44-characters-or-any-other-number";

pub(crate) fn root_client() -> RegisteredClient {
    let scopes = vec!["*".to_owned()];
    RegisteredClient { client_id: ROOT.to_owned(), access_token: TOKEN.into(), scopes }
}

pub(crate) fn root_api(root_url: &str, clock: QueueClock) -> Api {
    Api {
        root: root_url.to_owned(),
        id: ROOT.to_owned(),
        token: TOKEN.to_owned(),
        certificate: None,
        authorized_scopes: None,
        clock,
        http: http(),
        skew: 0,
    }
}

impl TestQueue {
    /// An in-memory queue at the recorded time, with `change` applied to its configuration.
    pub(crate) async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be made");
        let clock = QueueClock::manual(RECORDED);
        let mut settings = Config::new(Db::Memory, folder.path().join("artifacts"));
        settings.clients = vec![root_client()];
        settings.clock = clock.clone();
        // Short, because some tests wait for it to pass.
        settings.long_poll = Duration::from_millis(200);
        change(&mut settings);
        let clock = settings.clock.clone();
        let running = start(settings).await.expect("the queue starts");
        let api = root_api(running.root_url(), clock.clone());
        Self { running, clock, api, folder }
    }

    pub(crate) async fn new() -> Self {
        Self::with(|_| {}).await
    }

    /// Moves the clock and resolves what is due.
    pub(crate) async fn advance(&self, seconds: u64) {
        self.clock.advance(Duration::from_secs(seconds));
        self.running.tick().await;
    }
}
