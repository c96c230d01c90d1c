//! The file of a control socket: one listener has it at a time, and it is there for as long as that listens.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use tokio::net::UnixListener;

use super::short_socket_path;
use crate::host::file_lock::FileLock;

/// A socket that is listened on.
#[derive(Debug)]
pub struct Socket {
    pub(super) listener: UnixListener,
    pub(super) file: SocketFile,
}

/// Takes the file away when the socket is not listened on any more.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// The folder that it is in, which may have been replaced.
    folder: File,
    /// Which file it is.
    identity: Mutex<Identity>,
    /// Who has it may make the socket and take it away. Fields are dropped after the struct's own `drop`.
    lock: Mutex<FileLock>,
}

/// Device and inode of a file.
type Identity = (u64, u64);

fn identity(path: &Path) -> io::Result<Identity> {
    path.symlink_metadata().map(|about| (about.dev(), about.ino()))
}

/// Whether what is open is still what is at `path`.
fn is_same_file(open: &File, path: &Path) -> bool {
    let (open, there) = (open.metadata(), path.metadata());
    open.is_ok_and(|open| there.is_ok_and(|there| (open.dev(), open.ino()) == (there.dev(), there.ino())))
}

fn is_missing(path: &Path) -> bool {
    path.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let made = *self.identity.get_mut().unwrap_or_else(PoisonError::into_inner);
        if identity(&self.path).is_ok_and(|there| there != made) {
            tracing::debug!(path = %self.path.display(), "the control socket there is another worker's by now, and stays");
        } else if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "the control socket could not be removed");
        }
    }
}

impl Socket {
    /// Listens at `path`. A file there that nobody listens on any more is replaced. Its owner and group may give orders.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be written, or where somebody listens already; the text names the path.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
        let Some(name) = path.file_name() else {
            return Err(at(io::Error::new(io::ErrorKind::InvalidInput, "it names no file")));
        };
        let folder = parent_dir(path);
        fs::create_dir_all(folder).map_err(at)?;
        let open = File::open(folder).map_err(at)?;
        let used = || {
            let text = "another worker uses it; give each worker a `work_dir` or a `control.socket` of its own";
            at(io::Error::new(io::ErrorKind::AddrInUse, text))
        };
        // Between looking whether somebody listens and listening, another start could do the same, and each would take away
        // the other's socket.
        let lock = FileLock::acquire(&lock_path(path)).map_err(at)?.ok_or_else(used)?;
        if UnixStream::connect(short_socket_path(&open, Path::new(name))).is_ok() {
            return Err(used());
        }
        let (listener, made) = bind(path).map_err(at)?;
        let (path, made, lock) = (path.to_owned(), Mutex::new(made), Mutex::new(lock));
        Ok(Self { listener, file: SocketFile { path, folder: open, identity: made, lock } })
    }
}

impl SocketFile {
    /// Whether nothing is at its path.
    pub(super) fn is_missing(&self) -> bool {
        is_missing(&self.path)
    }

    /// Listens again where somebody has removed the socket, alone or with its lock: `None` is that it is there, or that the folder
    /// is another one by now, or the lock another worker's. May wait for the disk; needs a runtime.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be written; the text names the path.
    pub(super) fn recreate_if_removed(&self) -> io::Result<Option<UnixListener>> {
        let at = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", self.path.display()));
        let path = lock_path(&self.path);
        if !is_missing(&self.path) || !is_same_file(&self.folder, parent_dir(&self.path)) {
            return Ok(None);
        }
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_same_file(lock.file(), &path) {
            let Some(taken) = FileLock::acquire(&path).map_err(at)? else { return Ok(None) };
            *lock = taken;
        }
        let (listener, made) = bind(&self.path).map_err(at)?;
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = made;
        tracing::warn!(path = %self.path.display(), "somebody has removed the control socket; it is there again");
        Ok(Some(listener))
    }
}

fn parent_dir(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

fn lock_path(path: &Path) -> PathBuf {
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    lock.into()
}

fn bind(path: &Path) -> io::Result<(UnixListener, Identity)> {
    // Made where nobody else can reach it, so that there is no moment at which its rights are too wide.
    let private = parent_dir(path).join(format!(".control-{}", std::process::id()));
    drop(fs::remove_dir_all(&private));
    fs::DirBuilder::new().mode(0o700).create(&private)?;
    let made = bind_in(&private, path);
    drop(fs::remove_dir_all(&private));
    made
}

fn bind_in(private: &Path, path: &Path) -> io::Result<(UnixListener, Identity)> {
    let folder = File::open(private)?;
    let listener = UnixListener::bind(short_socket_path(&folder, Path::new("s")))?;
    fs::set_permissions(private.join("s"), fs::Permissions::from_mode(0o660))?;
    let made = identity(&private.join("s"))?;
    fs::rename(private.join("s"), path)?;
    Ok((listener, made))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_start_that_fails_leaves_the_socket_of_another_where_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        // Before it listens, while it does, and when its queue is full: nobody else gets the path.
        let first = Socket::listen(&path).unwrap();
        for _ in 0..3 {
            let error = Socket::listen(&path).unwrap_err();
            assert!(error.to_string().contains("another worker uses it"), "{error}");
            assert!(path.exists());
        }
        drop(first);
        assert!(!path.exists());
        drop(Socket::listen(&path).unwrap());
    }

    #[tokio::test]
    async fn a_worker_whose_folder_was_replaced_leaves_the_socket_of_the_next_one() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("work");
        let path = folder.join("s");
        let first = Socket::listen(&path).unwrap();
        fs::rename(&folder, home.path().join("moved")).unwrap();
        assert!(first.file.recreate_if_removed().unwrap().is_none(), "whoever comes next has the place");
        let next = Socket::listen(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(next);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_socket_that_was_removed_is_made_again_and_goes_with_its_worker() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let socket = Socket::listen(&path).unwrap();
        assert!(socket.file.recreate_if_removed().unwrap().is_none(), "it is there");
        for with_its_lock in [false, true] {
            fs::remove_file(&path).unwrap();
            if with_its_lock {
                fs::remove_file(lock_path(&path)).unwrap();
            }
            let _listener = socket.file.recreate_if_removed().unwrap().unwrap();
            UnixStream::connect(&path).unwrap();
            assert!(Socket::listen(&path).unwrap_err().to_string().contains("another worker uses it"));
        }
        fs::remove_file(&path).unwrap();
        fs::remove_file(lock_path(&path)).unwrap();
        let next = Socket::listen(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(socket.file.recreate_if_removed().unwrap().is_none(), "another worker has the lock");
        drop(next);
        let _listener = socket.file.recreate_if_removed().unwrap().unwrap();
        drop(socket);
        assert!(!path.exists());
    }
}
