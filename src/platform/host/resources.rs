//! Measures the free disk space and memory of this host.

use std::path::Path;

use journeyman_domain::worker::HostResources;

/// Blocks until the file system answers.
pub fn measure(dir: &Path) -> HostResources {
    let disk = rustix::fs::statvfs(dir).ok().map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
    let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_mem_available(&text));
    HostResources { disk, memory }
}

/// The size of the disk that holds a directory, or will hold it.
pub fn disk_size(dir: &Path) -> Option<u64> {
    let existing = dir.ancestors().find_map(|dir| rustix::fs::statvfs(dir).ok());
    existing.or_else(|| rustix::fs::statvfs(".").ok()).map(|stat| stat.f_blocks.saturating_mul(stat.f_frsize))
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
    fn disk_and_memory_are_measured() {
        let free = measure(Path::new("/"));
        assert!(free.disk.is_some() && free.memory.is_some_and(|bytes| bytes > 1 << 20), "{free:?}");
        assert_eq!(measure(Path::new("/nowhere/at/all")).disk, None);
    }

    #[test]
    fn meminfo_is_parsed() {
        assert_eq!(parse_mem_available("MemTotal:  10 kB\nMemAvailable:   23961280 kB\n"), Some(23_961_280 * 1024));
        assert_eq!(parse_mem_available("MemTotal:  10 kB\n"), None);
    }
}
