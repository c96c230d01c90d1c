//! The file of a control socket, which one process at a time listens on.

use std::convert::Infallible;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use axum::extract::DefaultBodyLimit;
use axum::http::StatusCode;
use axum::serve::Listener;
use axum::{Json, Router};
use tokio::net::unix::SocketAddr;
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::task::JoinSet;

use super::{CommandReply, short_socket_path};
use journeyman_domain::limits::{
    CONTROL_BACKLOG, CONTROL_BODY_BYTES_MAX, CONTROL_CONNECTIONS_MAX, CONTROL_HEAD_TIMEOUT,
};
use journeyman_platform::host::file_lock::FileLock;
use journeyman_platform::host::process;
use journeyman_platform::host::work_dir::ignore_missing;
use journeyman_platform::http::{self, Limits};

#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    file: SocketFile,
}

/// Removes the socket on drop.
#[derive(Debug)]
struct SocketFile {
    /// Through the open directory, so that the socket of another worker in a directory of the same name stays.
    path: PathBuf,
    _folder: File,
    /// Its owner may create and remove the socket. Dropped after [`SocketFile::drop`] has run.
    _lock: FileLock,
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(%error, "cannot remove the control socket");
        }
    }
}

impl Socket {
    /// Listens at `path`, for its owner and group, and replaces a socket that is no longer in use.
    pub fn listen(path: &Path) -> io::Result<Self> {
        let with_path = |error: io::Error| {
            let text = format!("cannot listen on the control socket {}: {error}", path.display());
            io::Error::new(error.kind(), text)
        };
        let Some(name) = path.file_name() else {
            return Err(with_path(io::Error::new(io::ErrorKind::InvalidInput, "not a file name")));
        };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        fs::create_dir_all(folder).map_err(|error| {
            let text =
                format!("cannot create the directory {}: {error}; is `worker.work_dir` right?", folder.display());
            io::Error::new(error.kind(), text)
        })?;
        let folder = File::open(folder).map_err(with_path)?;
        let short_path = short_socket_path(&folder, Path::new(name));
        let in_use = || {
            let text = "in use by another worker; give each worker its own `work_dir` or `control.socket`";
            with_path(io::Error::new(io::ErrorKind::AddrInUse, text))
        };
        // Without the lock, two processes that start together could both find no listener and replace each other's socket.
        let lock = FileLock::acquire(&lock_path(path)).map_err(with_path)?.ok_or_else(in_use)?;
        if std::os::unix::net::UnixStream::connect(&short_path).is_ok() {
            return Err(in_use());
        }
        let listener = bind(&short_path).map_err(with_path)?;
        Ok(Self { listener, file: SocketFile { path: short_path, _folder: folder, _lock: lock } })
    }

    /// Serves until dropped, then removes the socket.
    pub(super) async fn serve(self, router: Router) -> Infallible {
        let Self { listener, file: _file } = self;
        let limits = Limits {
            connections_max: CONTROL_CONNECTIONS_MAX,
            connections_per_peer_max: CONTROL_CONNECTIONS_MAX,
            head_timeout: CONTROL_HEAD_TIMEOUT,
            body_timeout: Some(CONTROL_HEAD_TIMEOUT),
            connection_age_max: None,
        };
        let listener = OutsideCallers { listener, refused: JoinSet::new() };
        let router = router.layer(DefaultBodyLimit::max(CONTROL_BODY_BYTES_MAX));
        // All of them are of this machine.
        http::serve(listener, router, limits, |_| ()).await
    }
}

/// Accepts no connection of a process that this one has started: a task that runs as the worker's user must not command it.
struct OutsideCallers {
    listener: UnixListener,
    refused: JoinSet<()>,
}

impl Listener for OutsideCallers {
    type Io = UnixStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (UnixStream, SocketAddr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.listener).await;
            if is_outside_caller(&stream) {
                return (stream, address);
            }
            while self.refused.try_join_next().is_some() {}
            if self.refused.len() < CONTROL_CONNECTIONS_MAX {
                self.refused.spawn(http::serve_one(stream, Router::new().fallback(refuse), CONTROL_HEAD_TIMEOUT));
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

fn is_outside_caller(stream: &UnixStream) -> bool {
    let Ok(caller) = stream.peer_cred() else { return false };
    // A process outside of this process's PID namespace has no id here.
    let Some(pid) = caller.pid().filter(|pid| *pid > 0) else { return true };
    // With `hidepid`, processes of other users, such as root, cannot be seen.
    let is_other_user = caller.uid() != rustix::process::geteuid().as_raw();
    process::is_descendant(pid).map_or(is_other_user, |descends| !descends)
}

async fn refuse() -> (StatusCode, Json<CommandReply>) {
    let message = "refused: the caller was started by the process that it wants to command; run the command outside of tasks \
                   and hooks";
    tracing::warn!("a task, hook or sidecar tried to use the control socket");
    (StatusCode::FORBIDDEN, Json(CommandReply { message: message.to_owned() }))
}

fn lock_path(path: &Path) -> PathBuf {
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    lock.into()
}

/// Replaces a socket that is no longer in use. The lock is held, so no other process binds or connects here.
fn bind(path: &Path) -> io::Result<UnixListener> {
    fs::remove_file(path).or_else(ignore_missing)?;
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    // Before it listens, so that others cannot connect with the permissions of the umask.
    fs::set_permissions(path, fs::Permissions::from_mode(0o660))?;
    socket.listen(CONTROL_BACKLOG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_start_leaves_the_socket_of_another_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let first = Socket::listen(&path).unwrap();
        for _ in 0..3 {
            let error = Socket::listen(&path).unwrap_err();
            assert!(error.to_string().contains("in use by another worker"), "{error}");
            assert!(path.exists());
        }
        drop(first);
        assert!(!path.exists());
        drop(Socket::listen(&path).unwrap());
    }

    #[tokio::test]
    async fn a_worker_whose_directory_was_replaced_leaves_the_socket_of_the_next_one() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("work");
        let path = folder.join("s");
        let first = Socket::listen(&path).unwrap();
        fs::rename(&folder, home.path().join("moved")).unwrap();
        let next = Socket::listen(&path).unwrap();
        drop(first);
        assert!(path.exists());
        drop(next);
        assert!(!path.exists());
    }
}
