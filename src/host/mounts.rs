//! The mount table, and unmounting what tasks have mounted in their directories.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change, unmount};

use crate::limits::UNMOUNT_PASSES_MAX;

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
    // Stacked mounts are handled one a pass.
    points.dedup();
    points
}

/// Whether anything is mounted at or below a directory.
pub(super) fn is_mounted_below(dir: &Path) -> io::Result<bool> {
    Ok(!mount_points_below(&mount_table()?, &dir.canonicalize()?).is_empty())
}

/// Unmounts everything at or below a directory, so that removing it deletes nothing outside of it.
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
    let (mut last_error, mut unmounted) = (None, 0_usize);
    for _ in 0..UNMOUNT_PASSES_MAX {
        let table = mount_table()?;
        let points = mount_points_below(&table, &dir);
        if points.is_empty() {
            break;
        }
        let unmounted_before = unmounted;
        for point in outermost_reachable(points) {
            if is_on_shared_mount(&table, &point) {
                continue;
            }
            // Unmounting in a shared tree would unmount for its other users too. REC follows the mount tree and not paths, so it
            // reaches mounts that other mounts cover.
            mount_change(&point, MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).ok();
            match unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
                Ok(()) => unmounted += 1,
                Err(error) => last_error = Some(error),
            }
        }
        if unmounted == unmounted_before {
            break;
        }
    }
    if unmounted > 0 {
        tracing::info!(dir = %dir.display(), mounts = unmounted, "unmounted the mounts of a task");
    }
    let remaining = mount_points_below(&mount_table()?, &dir);
    let Some(point) = remaining.first() else { return Ok(()) };
    let reason = last_error.map(|error| format!(" ({error})")).unwrap_or_default();
    let text = format!("{} is mounted and cannot be unmounted{reason}; unmount it", point.display());
    Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
}

/// Whether the visible mount at a point covers a shared mount at the same point. Unmounting it would unmount it for the other
/// users of the shared mount, which may own it; and the covered mount cannot be made private, since no path leads to it.
fn is_on_shared_mount(table: &[u8], point: &Path) -> bool {
    let at: Vec<MountEntry<'_>> = table.split(|byte| *byte == b'\n').filter_map(MountEntry::parse).collect();
    let at: Vec<&MountEntry<'_>> = at.iter().filter(|mount| unescape_path(mount.mount_point) == point).collect();
    let is_under = |lower: &MountEntry<'_>, upper: &MountEntry<'_>| lower.id == upper.parent;
    let top = at.iter().find(|top| !at.iter().any(|other| is_under(top, other)));
    top.is_some_and(|top| at.iter().any(|lower| is_under(lower, top) && lower.shared))
}

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
        // Optional fields follow the options, up to a dash.
        let shared = fields.skip(1).take_while(|field| *field != b"-").any(|field| field.starts_with(b"shared:"));
        Some(Self { id, parent, mount_point: point, shared })
    }
}

/// The outermost points whose path still leads to them. A point that a later mount covers is handled in a later pass.
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

/// Does not touch the mounted file system itself: its server may be unreachable.
fn is_free_of_symlinks(point: &Path) -> bool {
    let parent = point.parent().unwrap_or(point);
    let is_link = point.read_link().is_ok();
    !is_link && parent.canonicalize().is_ok_and(|real| real == parent)
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
    fn a_mount_on_a_shared_mount_is_detected_by_its_parent() {
        let table = |shared: &str| {
            format!(
                "20 1 0:1 / /w rw shared:1 - ext4 d rw\n36 20 0:1 /data /w/t rw {shared}- ext4 d rw\n\
                 40 36 0:9 / /w/t rw shared:7 master:2 - tmpfs d rw\n"
            )
        };
        assert!(is_on_shared_mount(table("shared:1 ").as_bytes(), Path::new("/w/t")));
        assert!(!is_on_shared_mount(table("").as_bytes(), Path::new("/w/t")));
        assert!(
            !is_on_shared_mount(table("shared:1 ").as_bytes(), Path::new("/w")),
            "it covers no mount at the same point"
        );
    }

    #[test]
    fn mounts_below_a_directory_are_found_and_similar_prefixes_are_not() {
        let line = |point: &str| format!("36 35 0:30 / {point} rw,relatime shared:1 - tmpfs tmpfs rw\n");
        let points = ["/", "/w/t/a\\040b/c", "/w/t", "/w/t/a\\040b", "/w/tt", "/w/t", "/w"];
        let table = points.map(line).concat();
        let found = mount_points_below(table.as_bytes(), Path::new("/w/t"));
        assert_eq!(found, ["/w/t", "/w/t/a b", "/w/t/a b/c"].map(PathBuf::from));
    }
}
