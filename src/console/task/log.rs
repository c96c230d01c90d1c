//! The logs of runs.

use journeyman_domain::id::Run;
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::{Api, Download, ListPage};

const LOG_ARTIFACT: &str = "public/logs/live.log";

/// Logs that need no scope.
pub(crate) const LOG_PREFIX: &str = "public/";

/// Opens the log of a run, under whichever of the usual names it has.
///
/// Only artifacts with the prefix are opened.
pub(crate) async fn open_log(api: &Api, run: &Run, prefix: &str) -> Result<Download, CallError> {
    let refused = match api.artifact(run, LOG_ARTIFACT).await {
        // It may also lead to a worker that is gone.
        Err(refused) => refused,
        opened => return opened,
    };
    let Ok(ListPage { entries: listed, .. }) = api.artifacts(run, None).await else { return Err(refused) };
    let names: Vec<&str> = listed.iter().filter_map(|artifact| artifact.get("name")?.as_str()).collect();
    // Of generic-worker and docker-worker, whose tasks choose the folder, and of scriptworker.
    for usual in ["live.log", "live_backing.log", "terminal.log", "chain_of_custody.log"] {
        let is_log = |name: &&&str| name.starts_with(prefix) && name.rsplit('/').next() == Some(usual);
        for name in names.iter().filter(is_log) {
            if let Ok(download) = api.artifact(run, name).await {
                return Ok(download);
            }
        }
    }
    Err(refused)
}
