//! What is mounted, and the end of what tasks have mounted in their folders.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{UnmountFlags, unmount};

/// A path as the kernel writes it in a table of mounts: `\\040` is a space, and the like.
pub(super) fn path(field: &str) -> PathBuf {
    let mut parts = field.split('\\');
    let mut out = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                out.extend_from_slice(part.get(3..).unwrap_or_default().as_bytes());
            }
            None => {
                out.push(b'\\');
                out.extend_from_slice(part.as_bytes());
            }
        }
    }
    OsString::from_vec(out).into()
}

/// Where something is mounted at a folder or below it, the latest first.
fn within(table: &[u8], folder: &Path) -> Vec<PathBuf> {
    let table = String::from_utf8_lossy(table);
    let points = table.lines().rev().filter_map(|line| line.split(' ').nth(4)).map(path);
    points.filter(|point| point.starts_with(folder)).collect()
}

/// Unmounts whatever is mounted at a folder or below it, so that its removal takes away nothing that lies elsewhere.
///
/// # Errors
///
/// Where something stays mounted, with where that is, or where the mounts cannot be told.
pub(super) fn detach(folder: &Path) -> io::Result<()> {
    // The table holds paths without links; the folder itself may be one.
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else { return Ok(()) };
    let folder = match parent.canonicalize() {
        Ok(parent) => parent.join(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for point in within(&std::fs::read("/proc/self/mountinfo")?, &folder) {
        unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).map_err(|error| {
            let text = format!("{} is mounted and cannot be unmounted ({error}); unmount it", point.display());
            io::Error::new(io::ErrorKind::ResourceBusy, text)
        })?;
        tracing::info!(at = %point.display(), "what a task had mounted is unmounted");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_read_as_the_kernel_writes_it() {
        assert_eq!(path("/a\\040b\\134c\\x"), Path::new("/a b\\c\\x"));
        assert_eq!(path("/gr\u{fc}n\\012"), Path::new("/gr\u{fc}n\n"));
    }

    #[test]
    fn what_is_mounted_in_a_folder_is_found_and_what_only_begins_like_it_is_not() {
        let line = |point: &str| format!("36 35 0:30 / {point} rw,relatime shared:1 - tmpfs tmpfs rw\n");
        let points = ["/", "/w/t", "/w/t/a\\040b", "/w/tt", "/w/t/a\\040b/c", "/w"];
        let table = points.map(line).concat();
        let found = within(table.as_bytes(), Path::new("/w/t"));
        assert_eq!(found, ["/w/t/a b/c", "/w/t/a b", "/w/t"].map(PathBuf::from));
    }
}
