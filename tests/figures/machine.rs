//! The rows of the table, and what the machine itself can do.

use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::Outcome;

pub(crate) struct Row {
    pub(crate) figure: String,
    pub(crate) reached: String,
    pub(crate) aim: &'static str,
    /// What the machine or a peer reaches, measured in the same run.
    pub(crate) limit: String,
}

/// The load average over the last minute.
pub(crate) fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(f64::NAN)
}

/// Prints the table as Markdown, as `src/guide/figures.md` has it.
pub(crate) fn print(rows: &[(Row, f64)]) {
    println!("| figure | reached | aim | limit of the machine | load |\n| --- | --- | --- | --- | --- |");
    for (Row { figure, reached, aim, limit }, load) in rows {
        println!("| {figure} | {reached} | {aim} | {limit} | {load:.1} |");
    }
}

/// The time on a clock that all processes share.
pub(crate) fn now() -> Duration {
    read(ClockId::Monotonic)
}

/// The CPU time of this process, all threads together.
pub(crate) fn cpu() -> Duration {
    read(ClockId::ProcessCPUTime)
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or_default(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

pub(crate) fn millis(span: Duration) -> String {
    format!("{:.2} ms", span.as_secs_f64() * 1e3)
}

pub(crate) fn micros_each(span: Duration, count: usize) -> f64 {
    span.as_secs_f64() * 1e6 / count as f64
}

/// CPU time and resident memory of a process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    pub(crate) resident_kib: u64,
    /// What is resident of its files, which is nearly all of its program: the kernel shares it, and can drop it.
    pub(crate) program_kib: u64,
}

impl Usage {
    pub(crate) fn of(pid: u32) -> Outcome<Self> {
        let mut cpu = Duration::ZERO;
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
            cpu += Duration::from_nanos(stat.split(' ').next().unwrap_or_default().parse()?);
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let kib = |name| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_whitespace().next().unwrap_or_default().parse()
        };
        Ok(Self { cpu, resident_kib: kib("VmRSS:")?, program_kib: kib("RssFile:")? })
    }

    pub(crate) fn megabytes(self) -> f64 {
        self.resident_kib as f64 * 1024.0 / 1e6
    }

    pub(crate) fn kib_above(self, before: Self, count: usize) -> f64 {
        self.resident_kib.saturating_sub(before.resident_kib) as f64 / count as f64
    }
}

/// Spans, sorted.
pub(crate) struct Spans(Vec<Duration>);

impl Spans {
    pub(crate) fn new(mut spans: Vec<Duration>) -> Self {
        spans.sort_unstable();
        Self(spans)
    }

    pub(crate) fn percentile(&self, hundredths: usize) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get(last * hundredths / 100).copied().unwrap_or_default()
    }

    /// Two percentiles as text.
    pub(crate) fn pair(&self, first: usize, second: usize) -> String {
        format!("{} and {}", millis(self.percentile(first)), millis(self.percentile(second)))
    }

    /// The percents by which two percentiles exceed those of `other`.
    pub(crate) fn percent_above(&self, other: &Self) -> String {
        let more = |hundredths| {
            (self.percentile(hundredths).as_secs_f64() / other.percentile(hundredths).as_secs_f64() - 1.0) * 100.0
        };
        format!("{:+.0} % and {:+.0} %", more(50), more(99))
    }

    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn per_second(&self) -> f64 {
        self.0.len() as f64 / self.0.iter().sum::<Duration>().as_secs_f64()
    }
}

/// How long one page of a file takes to become durable.
pub(crate) async fn flushes(folder: &Path, lasting: Duration) -> Outcome<Spans> {
    let path = folder.join("flush");
    tokio::task::spawn_blocking(move || {
        // As large as the queue's write-ahead log, and written round and round as that is.
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

/// How many processes a second a bare loop starts and waits for, `parallel` at a time.
pub(crate) async fn spawns_per_second(parallel: usize, count: usize) -> Outcome<f64> {
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
