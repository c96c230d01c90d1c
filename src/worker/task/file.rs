//! Open files of tasks. The thread that keeps leases may hold them: it neither reads nor closes them.

use std::fs::File;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use tokio::runtime::Handle;

/// An open file of a task. Clones share it and its offset, so use positioned reads, on a blocking thread.
#[derive(Debug, Clone)]
pub struct TaskFile(Arc<ClosedOffThread<File>>);

impl From<File> for TaskFile {
    fn from(file: File) -> Self {
        Self(Arc::new(ClosedOffThread::new(file)))
    }
}

impl Deref for TaskFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

/// Is dropped on a blocking thread of the runtime: closing the last descriptor of a removed file waits for its disk.
#[derive(Debug)]
pub(crate) struct ClosedOffThread<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> ClosedOffThread<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(Some(value))
    }
}

impl<T: Send + 'static> Deref for ClosedOffThread<T> {
    type Target = T;

    fn deref(&self) -> &T {
        let Some(value) = &self.0 else { unreachable!("used while it is dropped") };
        value
    }
}

impl<T: Send + 'static> DerefMut for ClosedOffThread<T> {
    fn deref_mut(&mut self) -> &mut T {
        let Some(value) = &mut self.0 else { unreachable!("used while it is dropped") };
        value
    }
}

impl<T: Send + 'static> Drop for ClosedOffThread<T> {
    fn drop(&mut self) {
        let value = self.0.take();
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn_blocking(move || drop(value));
        }
    }
}
