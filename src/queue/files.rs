//! Where the content of artifacts lies: one file each, under a folder of the queue's own.

use std::path::Path;

use sha2::{Digest as _, Sha256};

/// The place of an artifact within the folder. Its name may hold anything, so the file is named by a digest of it.
pub(crate) fn place(task: &str, run: u32, name: &str) -> String {
    let digest = Sha256::digest(name.as_bytes());
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{task}/{run}-{hex}")
}

/// Removes a file, or a task's whole folder. What is not there is no trouble; anything else is told in the log.
pub(crate) fn remove(folder: &Path, place: &str) {
    let path = folder.join(place);
    let gone = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
    match gone {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "an expired artifact could not be removed");
        }
    }
}
