//! How much of the disk a task's folder takes up.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

/// Resolves when a folder holds more than so many bytes, looked at now and then.
///
/// # Cancel safety
///
/// Cancel safe.
pub(crate) async fn wait_larger_than(folder: PathBuf, bytes: u64, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        if is_larger_than(folder.clone(), bytes).await {
            return;
        }
    }
}

/// Whether the files below a folder take up more than so many bytes of the disk.
pub(crate) async fn is_larger_than(folder: PathBuf, bytes: u64) -> bool {
    tokio::task::spawn_blocking(move || disk_usage_up_to(folder, bytes) > bytes).await.unwrap_or(false)
}

/// The bytes that a folder takes up, not counted much further than `enough`. What cannot be looked at counts nothing.
fn disk_usage_up_to(folder: PathBuf, enough: u64) -> u64 {
    let (mut total, mut folders) = (0_u64, vec![folder]);
    while let Some(folder) = folders.pop() {
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            let Ok(about) = entry.metadata() else { continue };
            total = total.saturating_add(about.blocks() * 512);
            if total > enough {
                return total;
            }
            if about.is_dir() {
                folders.push(entry.path());
            }
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_measured_with_all_that_is_below_it() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("file"), vec![1; 100_000]).unwrap();
        std::os::unix::fs::symlink("/usr", deep.join("elsewhere")).unwrap();
        let bytes = disk_usage_up_to(folder.path().to_owned(), u64::MAX);
        assert!((100_000..300_000).contains(&bytes), "{bytes}");
        assert!(disk_usage_up_to(folder.path().to_owned(), 1000) > 1000);
    }
}
