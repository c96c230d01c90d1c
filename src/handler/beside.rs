//! What a handler keeps there beside its tasks, for as long as its worker works: a service that they are forwarded to.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use super::artifact::Artifacts;
use super::context::{Cancel, CancelCause, Context, Task};
use super::log::{LogLimits, TaskLog};
use crate::domain::id::{Run, TaskId};
use crate::domain::time::Instant;
use crate::host::clock::Clock;
use crate::host::containment::Containment;
use crate::host::remains::Remains;
use crate::limits::SERVICE_LOG_BYTES_MAX;

pub use crate::domain::service::Serving;

/// What is known of what runs beside the tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Word {
    /// Whether tasks can be forwarded.
    pub serving: Serving,
    /// What it does, or why it is not there, for people. No secrets.
    pub what: String,
    /// How often it was started again.
    pub restarts: u64,
    /// Where its log is, if it has one.
    pub log: Option<PathBuf>,
}

impl Default for Word {
    fn default() -> Self {
        Self { serving: Serving::Down, what: "it is being started".to_owned(), restarts: 0, log: None }
    }
}

/// What the worker lends to a handler that keeps something there beside its tasks.
#[derive(Debug)]
pub struct Beside {
    folder: PathBuf,
    clock: Clock,
    containment: Containment,
    word: watch::Sender<Word>,
    over: watch::Receiver<bool>,
}

/// The other side of a [`Beside`].
#[derive(Debug)]
pub struct Lent {
    /// What is said of it. Closed when it has ended.
    pub word: watch::Receiver<Word>,
    /// Set to end it.
    pub over: watch::Sender<bool>,
}

impl Beside {
    /// Lends what is needed, and the folder `folder`, which need not exist.
    #[must_use]
    pub fn lend(folder: PathBuf, clock: Clock, containment: Containment) -> (Self, Lent) {
        let (word, heard) = watch::channel(Word::default());
        let (over, told) = watch::channel(false);
        (Self { folder, clock, containment, word, over: told }, Lent { word: heard, over })
    }

    /// The worker's clock.
    #[must_use]
    pub const fn clock(&self) -> Clock {
        self.clock
    }

    /// A folder of its own, which this makes where it is missing.
    ///
    /// # Errors
    ///
    /// Where it cannot be made.
    pub fn folder(&self, name: &str) -> io::Result<PathBuf> {
        let folder = self.folder.join(name);
        crate::host::folder::make(&folder)?;
        Ok(folder)
    }

    /// Where the log of what runs under this name is. That of the life before has `.before` at its end.
    #[must_use]
    pub fn log(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.log"))
    }

    /// Says how it is, and so whether tasks may be claimed.
    pub fn say(&self, word: Word) {
        self.word.send_if_modified(|last| {
            let news = *last != word;
            *last = word;
            news
        });
    }

    /// Resolves when the worker goes, and what runs has to end.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn over(&self) {
        let mut over = self.over.clone();
        // Where nobody is left to say so, it is over as well.
        drop(over.wait_for(|over| *over).await);
    }

    /// What a process is started with that is to run beside the tasks: an enclosure, a log and an end of its own. It is
    /// written down by what it is found again, should this worker be killed.
    ///
    /// # Errors
    ///
    /// Where that cannot be written down, or the folder cannot be made.
    pub fn one(&self, name: &str) -> io::Result<One> {
        let folder = self.folder(name)?;
        let path = self.log(name);
        let mut before = path.clone().into_os_string();
        before.push(".before");
        match std::fs::rename(&path, before) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let enclosure = self.containment.enclosure();
        // I27: what nobody has written down would outlive this worker.
        let remains = Arc::new(Remains::write(&self.folder, name, enclosure.name())?);
        let witness = Arc::clone(&remains);
        let enclosure = enclosure.witnessed_by(move |leader| witness.leads(leader));
        let task = TaskId::parse("service").ok_or_else(|| io::Error::other("the service has no valid name"))?;
        let task = Task {
            run: Run { task, run: 0 },
            source: String::new(),
            definition: serde_json::Value::Null,
            env: BTreeMap::new(),
        };
        let (cancel, orders) = watch::channel(None);
        // No claim is behind it, and so no lease.
        let (_, lease) = watch::channel(Instant::ORIGIN);
        let log = TaskLog::new(path, LIMITS);
        let context = Context::new(task, folder, log, Artifacts::new(), orders, lease, self.clock).within(enclosure);
        Ok(One { context, cancel, remains })
    }
}

const LIMITS: LogLimits =
    LogLimits { head_bytes: SERVICE_LOG_BYTES_MAX / 4 * 3, tail_bytes: SERVICE_LOG_BYTES_MAX / 4 };

/// One life of it.
#[derive(Debug)]
pub struct One {
    /// For [`process::Running`](super::process::Running).
    pub context: Context,
    cancel: watch::Sender<Option<Cancel>>,
    remains: Arc<Remains>,
}

impl One {
    /// Where it runs.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.context.workdir()
    }

    /// Tells it to end, and kills it when the grace is over.
    pub fn end(&self, grace: Duration, clock: Clock) {
        let order = Cancel { cause: CancelCause::Shutdown, deadline: clock.now().plus(grace), grace };
        self.cancel.send_replace(Some(order));
    }

    /// It has ended, and nothing of it is left.
    pub fn over(&self) {
        self.remains.forget();
    }
}
