//! What is mounted, and the end of what tasks have mounted in their folders.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use crate::limits::UNMOUNT_PASSES_MAX;

/// The mounts of this process, a line each. Paths in it need not be text.
pub(super) fn mount_table() -> io::Result<Vec<u8>> {
    std::fs::read("/proc/self/mountinfo")
}

/// A path as the kernel writes it in the table: `\040` is a space, and the like.
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

/// Where something is mounted at a folder or below it, the outer before the inner.
fn mount_points_below(table: &[u8], folder: &Path) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4)).map(unescape_path);
    let mut points: Vec<PathBuf> = points.filter(|point| point.starts_with(folder)).collect();
    points.sort_unstable();
    // Of several at one place the others come to light one by one.
    points.dedup();
    points
}

/// Unmounts whatever is mounted at a folder or below it, so that its removal takes away nothing that lies elsewhere.
///
/// # Errors
///
/// Where something stays mounted, with where that is, or where the mounts cannot be told.
pub(super) fn unmount_below(folder: &Path) -> io::Result<()> {
    // The table holds paths without links; the folder itself may be one.
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else { return Ok(()) };
    let folder = match parent.canonicalize() {
        Ok(parent) => parent.join(name),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let (mut why, mut gone) = (None, 0_usize);
    for _ in 0..UNMOUNT_PASSES_MAX {
        let table = mount_table()?;
        let points = mount_points_below(&table, &folder);
        if points.is_empty() {
            break;
        }
        let before = gone;
        for point in outermost_reachable(points) {
            if is_on_shared_mount(&table, &point) {
                continue;
            }
            // What is unmounted in a tree that others share would be unmounted for them as well. A tree is walked by what is
            // mounted on what, and not by paths, so that what lies under another mount is reached as well.
            mount_change(&point, MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).ok();
            // With all that is mounted in it.
            match unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => gone += 1,
                Err(error) => why = Some(error),
            }
        }
        if gone == before {
            break;
        }
    }
    if gone > 0 {
        tracing::info!(folder = %folder.display(), mounts = gone, "what a task had mounted is unmounted");
    }
    let left = mount_points_below(&mount_table()?, &folder);
    let Some(point) = left.first() else { return Ok(()) };
    let why = why.map(|error| format!(" ({error})")).unwrap_or_default();
    let text = format!("{} is mounted and cannot be unmounted{why}; unmount it", point.display());
    Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
}

/// Whether what is seen at a place was mounted on something that is mounted there as well and that others share. To unmount it
/// would unmount it for them, whose it may be; and what lies under it cannot be made private, since no path leads there.
fn is_on_shared_mount(table: &[u8], point: &Path) -> bool {
    let at: Vec<MountEntry<'_>> = table.split(|byte| *byte == b'\n').filter_map(MountEntry::parse).collect();
    let at: Vec<&MountEntry<'_>> = at.iter().filter(|mount| unescape_path(mount.mount_point) == point).collect();
    let is_under = |lower: &MountEntry<'_>, upper: &MountEntry<'_>| lower.id == upper.parent;
    let top = at.iter().find(|top| !at.iter().any(|other| is_under(top, other)));
    top.is_some_and(|top| at.iter().any(|lower| is_under(lower, top) && lower.shared))
}

/// What a line of the table says of a mount.
struct MountEntry<'a> {
    id: &'a [u8],
    parent: &'a [u8],
    mount_point: &'a [u8],
    shared: bool,
}

impl<'a> MountEntry<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let (id, parent) = (fields.next()?, fields.next()?);
        let point = fields.nth(2)?;
        // Behind its options, up to a dash.
        let shared = fields.skip(1).take_while(|field| *field != b"-").any(|field| field.starts_with(b"shared:"));
        Some(Self { id, parent, mount_point: point, shared })
    }
}

/// Those that can be reached, without what lies in another one of them. What a later mount covers is not reached by its path,
/// which may lead elsewhere by now: its turn comes after that one's.
fn outermost_reachable(points: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut outer: Vec<PathBuf> = Vec::new();
    for point in points {
        let is_inner = outer.last().is_some_and(|last| point.starts_with(last));
        if !is_inner && is_free_of_symlinks(&point) {
            outer.push(point);
        }
    }
    outer
}

/// Whether a path leads where it says, by no link. What is mounted there is not asked: its server may be gone.
fn is_free_of_symlinks(point: &Path) -> bool {
    let parent = point.parent().unwrap_or(point);
    let is_link = point.read_link().is_ok();
    !is_link && parent.canonicalize().is_ok_and(|real| real == parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_read_as_the_kernel_writes_it() {
        assert_eq!(unescape_path(b"/a\\040b\\134c\\x"), Path::new("/a b\\c\\x"));
        assert_eq!(unescape_path("/gr\u{fc}n\\012".as_bytes()), Path::new("/gr\u{fc}n\n"));
        let odd = OsString::from_vec(b"/no\xfftext".to_vec());
        assert_eq!(unescape_path(b"/no\xfftext"), Path::new(&odd));
    }

    #[test]
    fn what_lies_on_a_mount_that_is_shared_is_known_by_its_parent() {
        let table = |shared: &str| {
            format!(
                "20 1 0:1 / /w rw shared:1 - ext4 d rw\n36 20 0:1 /data /w/t rw {shared}- ext4 d rw\n\
                 40 36 0:9 / /w/t rw shared:7 master:2 - tmpfs d rw\n"
            )
        };
        assert!(is_on_shared_mount(table("shared:1 ").as_bytes(), Path::new("/w/t")));
        assert!(!is_on_shared_mount(table("").as_bytes(), Path::new("/w/t")));
        assert!(!is_on_shared_mount(table("shared:1 ").as_bytes(), Path::new("/w")), "what it lies on is elsewhere");
    }

    #[test]
    fn what_is_mounted_in_a_folder_is_found_and_what_only_begins_like_it_is_not() {
        let line = |point: &str| format!("36 35 0:30 / {point} rw,relatime shared:1 - tmpfs tmpfs rw\n");
        let points = ["/", "/w/t/a\\040b/c", "/w/t", "/w/t/a\\040b", "/w/tt", "/w/t", "/w"];
        let table = points.map(line).concat();
        let found = mount_points_below(table.as_bytes(), Path::new("/w/t"));
        assert_eq!(found, ["/w/t", "/w/t/a b", "/w/t/a b/c"].map(PathBuf::from));
    }
}
