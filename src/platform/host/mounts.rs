//! The mount table, and unmounting what tasks have mounted in their directories.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use journeyman_domain::limits::TASK_MOUNTS_MAX;

/// `/proc/self/mountinfo`, whose paths need not be UTF-8.
pub(super) fn mount_table() -> io::Result<Vec<u8>> {
    std::fs::read("/proc/self/mountinfo")
}

/// Decodes a path of the mount table, in which `\040` is a space.
pub(super) fn unescape_path(field: &[u8]) -> PathBuf {
    let mut parts = field.split(|byte| *byte == b'\\');
    let mut out = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        let code = part.get(..3).and_then(|code| u8::from_str_radix(str::from_utf8(code).ok()?, 8).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                out.extend_from_slice(part.get(3..).unwrap_or_default());
            }
            None => {
                out.push(b'\\');
                out.extend_from_slice(part);
            }
        }
    }
    OsString::from_vec(out).into()
}

/// The mount points at or below a directory, outer before inner.
fn mount_points_below(table: &[u8], dir: &Path) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4)).map(unescape_path);
    let mut points: Vec<PathBuf> = points.filter(|point| point.starts_with(dir)).collect();
    points.sort_unstable();
    points
}

/// True if anything is mounted at or below a directory.
pub(super) fn is_mounted_below(dir: &Path) -> io::Result<bool> {
    Ok(!mount_points_below(&mount_table()?, &dir.canonicalize()?).is_empty())
}

/// Unmounts everything at or below a directory, so that removing it deletes nothing outside of it.
///
/// Several mounts at one point stay: the lower ones may belong to a shared tree, and no path leads to them.
///
/// # Errors
///
/// A mount cannot be unmounted, or the mount table cannot be read.
pub(super) fn unmount_below(dir: &Path) -> io::Result<()> {
    // The table has canonical paths; the directory itself may be a symlink.
    let (Some(parent), Some(name)) = (dir.parent(), dir.file_name()) else { return Ok(()) };
    let dir = match parent.canonicalize() {
        Ok(parent) => parent.join(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for _ in 0..TASK_MOUNTS_MAX {
        let points = mount_points_below(&mount_table()?, &dir);
        // The outermost: a point in it may be covered, so that its path leads elsewhere.
        let Some(point) = points.first() else { return Ok(()) };
        let is_covered = points.get(1) == Some(point);
        let unmounted = if is_covered { Err(Errno::BUSY) } else { unmount_tree(point) };
        unmounted.map_err(|error| {
            let text = format!("{} is mounted and cannot be unmounted ({error}); unmount it", point.display());
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        })?;
        tracing::info!(point = %point.display(), "unmounted a mount of a task");
    }
    Err(io::Error::other(format!("{}: more than {TASK_MOUNTS_MAX} mounts; unmount them", dir.display())))
}

fn unmount_tree(point: &Path) -> rustix::io::Result<()> {
    // Unmounting in a shared tree would unmount for its other users too. REC follows the mount tree and not paths, so it reaches
    // mounts that other mounts cover.
    mount_change(point, MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).ok();
    unmount(point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_paths_are_decoded() {
        assert_eq!(unescape_path(b"/a\\040b\\134c\\x"), Path::new("/a b\\c\\x"));
        assert_eq!(unescape_path("/gr\u{fc}n\\012".as_bytes()), Path::new("/gr\u{fc}n\n"));
        let odd = OsString::from_vec(b"/no\xfftext".to_vec());
        assert_eq!(unescape_path(b"/no\xfftext"), Path::new(&odd));
    }

    #[test]
    fn mounts_below_a_directory_are_found_and_similar_prefixes_are_not() {
        let line = |point: &str| format!("36 35 0:30 / {point} rw,relatime shared:1 - tmpfs tmpfs rw\n");
        let points = ["/", "/w/t/a\\040b/c", "/w/t", "/w/t/a\\040b", "/w/tt", "/w/t", "/w"];
        let table = points.map(line).concat();
        let found = mount_points_below(table.as_bytes(), Path::new("/w/t"));
        assert_eq!(found, ["/w/t", "/w/t", "/w/t/a b", "/w/t/a b/c"].map(PathBuf::from));
    }
}
