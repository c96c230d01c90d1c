//! Reads the log of a container into its task's log, from where an earlier read ended.

use std::io;

use futures_util::TryStreamExt as _;
use jiff::Timestamp;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::time::sleep;
use tokio_util::io::StreamReader;

use super::held_pods::HeldPod;
use crate::handler::log::TaskLog;
use journeyman_domain::limits::{POD_LOG_LINE_BYTES_MAX, POD_LOG_RETRY};
use journeyman_platform::http::client::root_cause;
use journeyman_platform::kubernetes::KubernetesClient;

/// Reads until it is dropped.
pub(super) async fn follow(client: &KubernetesClient, name: &str, container: &str, held: &HeldPod, log: &TaskLog) {
    loop {
        // Not at once: a container that has ended ends its log.
        _ = read(client, name, container, held, log, true).await;
        sleep(POD_LOG_RETRY).await;
    }
}

/// Reads to its end.
///
/// Cancel safe: a line that was not written is read again.
pub(super) async fn read(
    client: &KubernetesClient,
    name: &str,
    container: &str,
    held: &HeldPod,
    log: &TaskLog,
    follow: bool,
) -> Result<(), String> {
    // Whole seconds.
    let since = held.log_read_until.lock().and_then(|time| Timestamp::from_second(time.as_second()).ok());
    let since = since.map(|time| time.to_string());
    let follow = if follow { "true" } else { "false" };
    let mut query = vec![("container", container), ("follow", follow), ("timestamps", "true")];
    query.extend(since.as_ref().map(|time| ("sinceTime", time.as_str())));
    let response = client.log(name, &query).await.map_err(|error| error.to_string())?;
    let pieces = response.bytes_stream().map_err(|error| io::Error::other(root_cause(&error)));
    let mut lines = StreamReader::new(Box::pin(pieces));
    loop {
        log.ready().await;
        let mut line = Vec::new();
        let mut next = (&mut lines).take(POD_LOG_LINE_BYTES_MAX);
        if next.read_until(b'\n', &mut line).await.map_err(|error| error.to_string())? == 0 {
            return Ok(());
        }
        let (time, text) = split_time(&line);
        let mut until = held.log_read_until.lock();
        // The server begins with the second of `since_time`.
        if time.is_some() && time <= *until {
            continue;
        }
        log.write(text);
        *until = time.or(*until);
    }
}

/// The time that begins a line. The rest of a long line has none.
fn split_time(line: &[u8]) -> (Option<Timestamp>, &[u8]) {
    let space = line.iter().position(|byte| *byte == b' ');
    let time = space.and_then(|at| std::str::from_utf8(&line[..at]).ok()?.parse().ok());
    match (time, space) {
        (Some(time), Some(at)) => (Some(time), &line[at + 1..]),
        (None, _) | (_, None) => (None, line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_begins_with_its_time() {
        let time: Timestamp = "2026-01-01T00:00:00.000000001Z".parse().unwrap();
        assert_eq!(split_time(b"2026-01-01T00:00:00.000000001Z a b\n"), (Some(time), &b"a b\n"[..]));
        assert_eq!(split_time(b"2026-01-01T00:00:00.000000001Z \n"), (Some(time), &b"\n"[..]));
        for other in [&b"no time\n"[..], b"", b"x", b"\xff y"] {
            assert_eq!(split_time(other), (None, other));
        }
    }
}
