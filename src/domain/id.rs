//! What is worked on, by name. A value of these types cannot be malformed.

use alloc::boxed::Box;
use core::fmt;

/// The longest task id any source may use, in bytes.
pub const TASK_ID_BYTES_MAX: usize = 128;

/// The name of a task. Printable ASCII without `/`, so that it can be a folder and a log field.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(Box<str>);

impl TaskId {
    /// Accepts a task id, or `None` where it is empty, over [`TASK_ID_BYTES_MAX`], starts with a dot
    /// or holds anything but printable ASCII without `/` and space.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let fits = !text.is_empty() && text.len() <= TASK_ID_BYTES_MAX && !text.starts_with('.');
        let clean = text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/');
        (fits && clean).then(|| Self(text.into()))
    }

    /// The id as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// One attempt at a task. Displays as `task/run`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The task.
    pub task: TaskId,
    /// The attempt, from 0.
    pub run: u32,
}

impl fmt::Display for Run {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.task, self.run)
    }
}

/// A source of this worker, by its place in the configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceId(pub u16);

/// The service behind a source. Sources that share it speak of the same runs; those of different ones may use equal names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceId(pub u16);

/// One queue of a source, by its place in the source's priority order; 0 is the highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PriorityQueue(pub u16);

/// Names one message or one grant for as long as this process lives. Never given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocalToken(pub u64);
