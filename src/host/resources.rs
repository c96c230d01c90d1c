//! What this machine has left: disk and memory.

use std::path::Path;

use crate::domain::worker::HostResources;

/// Looks now. Blocks for as long as the file system takes.
#[must_use]
pub fn measure(folder: &Path) -> HostResources {
    let disk = rustix::fs::statvfs(folder).ok().map(|about| about.f_bavail.saturating_mul(about.f_frsize));
    let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_mem_available(&text));
    HostResources { disk, memory }
}

/// `MemAvailable` in bytes.
fn parse_mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_and_the_memory_are_measured() {
        let room = measure(Path::new("/"));
        assert!(room.disk.is_some() && room.memory.is_some_and(|bytes| bytes > 1 << 20), "{room:?}");
        assert_eq!(measure(Path::new("/nowhere/at/all")).disk, None);
    }

    #[test]
    fn memory_is_read_as_the_kernel_writes_it() {
        assert_eq!(parse_mem_available("MemTotal:  10 kB\nMemAvailable:   23961280 kB\n"), Some(23_961_280 * 1024));
        assert_eq!(parse_mem_available("MemTotal:  10 kB\n"), None);
    }
}
