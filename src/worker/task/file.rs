//! Open files of tasks. The thread that keeps leases may hold them: it neither reads nor closes them.

use std::fs::File;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use tokio::runtime::Handle;

use journeyman_domain::limits::REDACT_READ_BYTES;

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

/// The SHA-256 of the first `bytes` of a file, in hexadecimal digits. Blocks.
pub(crate) fn digest(file: &File, bytes: u64) -> io::Result<String> {
    let mut digest = Sha256::new();
    read_pieces(file, bytes, |piece| {
        digest.update(piece);
        Ok(())
    })?;
    Ok(hex::encode(digest.finalize()))
}

/// Reads the first `bytes` of a file, wherever it is positioned. Blocks.
pub(crate) fn read_pieces(file: &File, bytes: u64, mut each: impl FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let (mut buffer, mut at) = (vec![0; REDACT_READ_BYTES], 0);
    while at < bytes {
        let wanted = usize::try_from(bytes - at).unwrap_or(REDACT_READ_BYTES).min(REDACT_READ_BYTES);
        let read = file.read_at(buffer.get_mut(..wanted).unwrap_or_default(), at)?;
        if read == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        at += read as u64;
        each(buffer.get(..read).unwrap_or_default())?;
    }
    Ok(())
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
