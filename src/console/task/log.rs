//! The logs of runs.

use std::time::Duration;

use tokio::time::timeout;

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

/// The end of a log.
#[derive(Debug, Default)]
pub(crate) struct LogEnd {
    pub(crate) text: String,
    /// Lines before it.
    pub(crate) lines_cut: usize,
    /// Its last line is the last one of the log.
    pub(crate) is_whole: bool,
}

/// Reads a log for `limit` at most, and keeps its last whole lines, `bytes_max` bytes at most. The log of a running task ends where
/// nothing has come for `stall`.
pub(crate) async fn read_end(
    mut download: Download,
    bytes_max: usize,
    limit: Duration,
    stall: Option<Duration>,
) -> LogEnd {
    let (mut bytes, mut lines_cut) = (Vec::new(), 0);
    let mut cut = |bytes: &mut Vec<u8>| {
        let over = bytes.len().saturating_sub(bytes_max);
        if over > 0 {
            let end = bytes[over..].iter().position(|byte| *byte == b'\n').map_or(over, |at| over + at + 1);
            lines_cut += bytes.drain(..end).filter(|byte| *byte == b'\n').count();
        }
    };
    let reading = async {
        loop {
            match timeout(stall.unwrap_or(limit), download.next_chunk()).await {
                Ok(Ok(Some(chunk))) => bytes.extend_from_slice(&chunk),
                Ok(Ok(None)) => return true,
                Ok(Err(_)) => return false,
                Err(_) => return stall.is_some(),
            }
            // At twice the size only: each cut moves all bytes that stay.
            if bytes.len() > 2 * bytes_max {
                cut(&mut bytes);
            }
        }
    };
    let is_whole = timeout(limit, reading).await.unwrap_or(false);
    cut(&mut bytes);
    LogEnd { text: String::from_utf8_lossy(&bytes).into_owned(), lines_cut, is_whole }
}
