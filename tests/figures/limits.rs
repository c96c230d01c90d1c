//! What the machine itself can do: how often its disk makes something durable, how fast it starts processes.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::task::JoinSet;

use crate::Done;
use crate::fleet::slugid;
use crate::roles::now;

/// Spans, sorted.
#[derive(Debug, Clone)]
pub(crate) struct Spans(Vec<Duration>);

impl Spans {
    pub(crate) fn new(mut spans: Vec<Duration>) -> Self {
        spans.sort_unstable();
        Self(spans)
    }

    /// The span that so many in a hundred do not exceed.
    pub(crate) fn percentile(&self, hundredths: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get(last * hundredths / 100).copied().unwrap_or_default()
    }

    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    fn mean(&self) -> Duration {
        let count = u32::try_from(self.0.len()).unwrap_or(u32::MAX).max(1);
        self.0.iter().sum::<Duration>() / count
    }

    pub(crate) fn per_second(&self) -> f64 {
        1.0 / self.mean().as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// How long it takes to make one page of a file durable, in the folder that the queues keep their files in.
pub(crate) async fn flushes(folder: &Path, lasting: Duration) -> Done<Spans> {
    let path = folder.join(format!("flush-{}", slugid()));
    tokio::task::spawn_blocking(move || {
        // As large as the log of the queue's database, and written round and round as that is.
        const PAGES: u64 = 1000;
        let page = [0x5a_u8; 4096];
        let file = std::fs::File::create(&path)?;
        for place in 0..PAGES {
            file.write_all_at(&page, place * 4096)?;
        }
        file.sync_all()?;
        let (began, mut spans) = (now(), Vec::new());
        while now() - began < lasting {
            let at = now();
            file.write_all_at(&page, spans.len() as u64 % PAGES * 4096)?;
            rustix::fs::fdatasync(&file)?;
            spans.push(now() - at);
        }
        std::fs::remove_file(&path)?;
        Ok(Spans::new(spans))
    })
    .await?
}

/// How many processes a second a loop starts and waits for that does nothing else, so many at once.
pub(crate) async fn processes(parallel: usize, count: usize) -> Done<f64> {
    let began = now();
    let mut loops = JoinSet::new();
    for number in 0..parallel {
        let share = count / parallel + usize::from(number < count % parallel);
        loops.spawn(async move {
            for _ in 0..share {
                let mut command = Command::new("/bin/true");
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
                command.status().await?;
            }
            Ok::<(), std::io::Error>(())
        });
    }
    while let Some(ended) = loops.join_next().await {
        ended??;
    }
    Ok(count as f64 / (now() - began).as_secs_f64())
}
