//! Reads the log of a container into its task's log, from where an earlier read ended.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::LogParams;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _};
use tokio::time::sleep;
use tokio_util::compat::FuturesAsyncReadCompatExt as _;

use super::held_pods::HeldPod;
use crate::handler::log::TaskLog;
use journeyman_domain::limits::{POD_LOG_LINE_BYTES_MAX, POD_LOG_RETRY};

/// Reads until it is dropped.
pub(super) async fn follow(api: &Api<Pod>, name: &str, container: &str, held: &HeldPod, log: &TaskLog) {
    loop {
        // Not at once: a container that has ended ends its log.
        _ = read(api, name, container, held, log, true).await;
        sleep(POD_LOG_RETRY).await;
    }
}

/// Reads to its end.
///
/// Cancel safe: a line that was not written is read again.
pub(super) async fn read(
    api: &Api<Pod>,
    name: &str,
    container: &str,
    held: &HeldPod,
    log: &TaskLog,
    follow: bool,
) -> Result<(), String> {
    // Whole seconds, which the client would round up.
    let since_time = held.log_read_until.lock().and_then(|time| Timestamp::from_second(time.as_second()).ok());
    let params = LogParams {
        container: Some(container.to_owned()),
        follow,
        since_time,
        timestamps: true,
        ..LogParams::default()
    };
    let stream = api.log_stream(name, &params).await.map_err(|error| error.to_string())?;
    let mut lines = tokio::io::BufReader::new(stream.compat());
    loop {
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
