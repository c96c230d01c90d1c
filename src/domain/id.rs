//! Validated names of tasks, runs, sources and queues.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use serde::{Deserialize, Serialize};

pub const TASK_ID_BYTES_MAX: usize = 128;

/// Printable ASCII without `/`, so that it can be a directory name and a log field. Clones share it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Box<str>", into = "Box<str>")]
pub struct TaskId(Arc<str>);

impl TaskId {
    /// Returns `None` for an empty id, one over [`TASK_ID_BYTES_MAX`], one that starts with a dot, or one with
    /// characters other than printable ASCII without `/` and space.
    pub fn parse(text: &str) -> Option<Self> {
        let fits = !text.is_empty() && text.len() <= TASK_ID_BYTES_MAX && !text.starts_with('.');
        let clean = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
        (fits && clean).then(|| Self(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<Box<str>> for TaskId {
    type Error = &'static str;

    fn try_from(text: Box<str>) -> Result<Self, Self::Error> {
        Self::parse(&text).ok_or("invalid task id")
    }
}

impl From<TaskId> for Box<str> {
    fn from(id: TaskId) -> Self {
        id.as_str().into()
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// One run of a task. Displays as `task/run`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Run {
    pub task: TaskId,
    pub run: u32,
}

impl fmt::Display for Run {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.task, self.run)
    }
}

/// A source, by its position in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u16);

impl SourceId {
    /// There are at most 65,536 sources.
    pub fn from_index(index: usize) -> Self {
        Self(u16::try_from(index).unwrap_or(u16::MAX))
    }

    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The service behind a source. Sources of one service refer to the same runs; sources of different services may use
/// equal ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u16);

/// A queue of a source, by its position in the priority order; 0 is the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PriorityQueue(pub u16);

/// Identifies one message or one grant within this process. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalToken(pub u64);
