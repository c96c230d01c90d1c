//! Reads a file whose existence is a termination notice. It contains an RFC 3339 time, or nothing, which means at once.
//!
//! Any other content means at once too: releasing too early costs a retry, releasing too late costs a lease.

use std::io;
use std::path::Path;

use jiff::Timestamp;
use tokio::io::AsyncReadExt as _;

use super::{NoticeReader, time_left};
use journeyman_domain::limits::{METADATA_TIMEOUT, NOTICE_FILE_BYTES_MAX};
use journeyman_domain::termination_notice::{NoticeReading, Termination};
use journeyman_domain::time::Instant;

pub(super) struct Reader<'a> {
    path: &'a Path,
    invalid_logged: bool,
}

impl<'a> Reader<'a> {
    pub(super) const fn new(path: &'a Path) -> Self {
        Self { path, invalid_logged: false }
    }
}

impl NoticeReader for Reader<'_> {
    async fn read(&mut self, sent_at: Instant) -> Result<NoticeReading, String> {
        let path = self.path.display();
        let text = read(self.path).await.map_err(|error| format!("{path}: {error}"))?;
        let Some(text) = text else { return Ok(NoticeReading::Nothing) };
        if let Ok(until) = text.trim().parse::<Timestamp>() {
            let at = sent_at.plus(time_left(until, Timestamp::now()));
            return Ok(NoticeReading::Terminating(Termination::At(at)));
        }
        if !text.trim().is_empty() && !std::mem::replace(&mut self.invalid_logged, true) {
            tracing::warn!(
                %path,
                "termination file contains no RFC 3339 time such as 2030-01-31T12:00:00Z; assuming termination at once"
            );
        }
        Ok(NoticeReading::Terminating(Termination::Soon))
    }
}

/// `None` if the file is missing.
async fn read(path: &Path) -> io::Result<Option<String>> {
    let content = async {
        // Opening a FIFO would wait for a writer.
        if !tokio::fs::metadata(path).await?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let mut bytes = Vec::new();
        tokio::fs::File::open(path).await?.take(NOTICE_FILE_BYTES_MAX).read_to_end(&mut bytes).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match tokio::time::timeout(METADATA_TIMEOUT, content).await? {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        content => content.map(Some),
    }
}
