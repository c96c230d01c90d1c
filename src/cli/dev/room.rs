//! The folder that `dev` keeps everything in. It goes with the process; that of one that was killed goes with the next `dev`.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::cli::exit::{Exit, Failure};
use crate::cli::output;
use crate::host::folder;
use crate::host::lock::Locked;
use crate::limits::DEV_ROOMS_LEFT_MAX;
use crate::worker::end_left_in;

const PREFIX: &str = "journeyman-dev-";
/// The file in it that is locked for as long as the process lives.
const LOCK: &str = "dev.lock";
/// Where in it its worker works, or each of its workers in a folder of its own.
pub(super) const WORK: &str = "work";

/// A folder that goes with this process.
pub(super) struct Room {
    path: PathBuf,
    _lock: Locked,
}

impl Room {
    /// Makes one, and ends what others have left whose process was killed.
    ///
    /// # Errors
    ///
    /// [`Exit::Unfit`] where it cannot be made.
    pub(super) fn make() -> Result<Self, Failure> {
        let home = std::env::temp_dir();
        sweep(&home);
        let path = home.join(format!("{PREFIX}{}", uuid::Uuid::new_v4().simple()));
        let failed = |error| Failure::new(Exit::Unfit, format!("cannot make {}: {error}", path.display()));
        let lock = made(&home, &path).map_err(failed)?;
        Ok(Self { path, _lock: lock })
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(error) = folder::remove(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "this folder could not be removed");
        }
    }
}

/// It has its name once it is locked, so that nobody takes it for one that was left.
fn made(home: &Path, path: &Path) -> io::Result<Locked> {
    let unnamed = home.join(format!(".{PREFIX}{}", uuid::Uuid::new_v4().simple()));
    fs::DirBuilder::new().mode(0o700).create(&unnamed)?;
    let named = (|| {
        let lock = Locked::take(&unnamed.join(LOCK))?.ok_or(io::ErrorKind::ResourceBusy)?;
        fs::rename(&unnamed, path)?;
        Ok(lock)
    })();
    if named.is_err() {
        drop(fs::remove_dir_all(&unnamed));
    }
    named
}

/// Ends what is left of every `dev` of this user that was killed.
fn sweep(home: &Path) {
    let own = rustix::process::geteuid().as_raw();
    let is_room = |entry: &fs::DirEntry| {
        let named = entry.file_name().to_string_lossy().starts_with(PREFIX);
        // Nobody else may have written in it.
        let is_own = |about: fs::Metadata| about.is_dir() && about.uid() == own && about.mode() & 0o077 == 0;
        named && entry.metadata().is_ok_and(is_own)
    };
    let rooms = fs::read_dir(home).into_iter().flatten().flatten().filter(is_room);
    let mut left = 0;
    for room in rooms.map(|entry| entry.path()) {
        if left == DEV_ROOMS_LEFT_MAX {
            break;
        }
        let ended = end(&room);
        left += usize::from(!matches!(ended, Ok(None)));
        match ended {
            Ok(None) => {}
            Ok(Some(tasks)) => {
                let tasks = match tasks {
                    0 => String::new(),
                    1 => ", and a task that still ran is ended".to_owned(),
                    many => format!(", and {many} tasks that still ran are ended"),
                };
                output::note(&format!("note: {} of a `dev` that was killed is removed{tasks}", room.display()));
            }
            Err(error) => output::note(&format!(
                "note: {} of a `dev` that was killed stays: {error}; end what is in it, and remove it",
                room.display()
            )),
        }
    }
}

/// Ends the payloads of one, and removes it. Answers how many tasks had any; `None` where its `dev` lives.
fn end(room: &Path) -> io::Result<Option<usize>> {
    let Some(_lock) = Locked::take_left(&room.join(LOCK))? else { return Ok(None) };
    let mut ended = 0;
    let work = room.join(WORK);
    let of_groups = fs::read_dir(&work).into_iter().flatten().flatten().map(|entry| entry.path());
    for work in std::iter::once(work).chain(of_groups).filter(|work| folder::is_work(work)) {
        // The workers of a controller that was killed live on.
        let lives =
            || io::Error::new(io::ErrorKind::ResourceBusy, format!("a worker still lives in {}", work.display()));
        let tasks = end_left_in(&work)?.ok_or_else(lives)?;
        ended += tasks;
    }
    folder::remove(room)?;
    Ok(Some(ended))
}
