//! Measures the disk usage of a task's directory, for `host.task_disk`.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{StatVfs, statvfs};
use tokio::time::Instant;

/// Measuring takes at most one part of the time in so many.
const MEASURING_SHARE_MAX: u32 = 20;

/// Resolves when a directory takes more than `bytes` of the disk, measured at an interval.
///
/// # Cancel safety
///
/// Cancel safe.
pub async fn wait_larger_than(dir: PathBuf, bytes: u64, interval: Duration) {
    let mut wait = interval;
    loop {
        tokio::time::sleep(wait).await;
        let started = Instant::now();
        if is_larger_than(dir.clone(), bytes).await {
            return;
        }
        // A directory of a million files takes seconds.
        wait = interval.max(started.elapsed() * MEASURING_SHARE_MAX);
    }
}

pub async fn is_larger_than(dir: PathBuf, bytes: u64) -> bool {
    // The usual case takes a microsecond: a directory cannot be larger than what its disk holds. A disk that hangs answers
    // no such question either.
    let on_disk = |stat: StatVfs| stat.f_blocks.saturating_sub(stat.f_bfree).saturating_mul(stat.f_frsize);
    let measure =
        move || statvfs(&dir).map_or(true, |stat| on_disk(stat) > bytes) && disk_usage_up_to(dir, bytes) > bytes;
    tokio::task::spawn_blocking(measure).await.unwrap_or(false)
}

/// What the files of a directory take on the disk. Blocks.
pub fn disk_usage(dir: PathBuf) -> u64 {
    disk_usage_up_to(dir, u64::MAX)
}

/// Stops counting above `limit`. Unreadable entries count as 0.
fn disk_usage_up_to(dir: PathBuf, limit: u64) -> u64 {
    let (mut total, mut dirs) = (0_u64, vec![dir]);
    while let Some(dir) = dirs.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            let Ok(metadata) = entry.metadata() else { continue };
            total = total.saturating_add(metadata.blocks() * 512);
            if total > limit {
                return total;
            }
            if metadata.is_dir() {
                dirs.push(entry.path());
            }
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_directory_tree_are_summed() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("a/b/c");
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("file"), vec![1; 100_000]).unwrap();
        std::os::unix::fs::symlink("/usr", deep.join("elsewhere")).unwrap();
        let bytes = disk_usage_up_to(dir.path().to_owned(), u64::MAX);
        assert!((100_000..300_000).contains(&bytes), "{bytes}");
        assert!(disk_usage_up_to(dir.path().to_owned(), 1000) > 1000);
    }
}
