//! Finds the remaining processes of a payload, by what it cannot remove altogether: the cookie in its environment, the mark in its
//! arguments, and its working directory.

use std::path::{Path, PathBuf};

pub(crate) struct PayloadScan {
    pub(crate) cookie: String,
    pub(crate) mark: String,
    pub(crate) folder: PathBuf,
}

impl PayloadScan {
    /// The running processes that match, with their command lines.
    pub(crate) fn running(&self) -> Vec<String> {
        let own = std::process::id().to_string();
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.parse::<u32>().is_ok() && name != own && self.matches(&entry.path()) && runs(&entry.path()) {
                let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
                found.push(format!("{name} {}", String::from_utf8_lossy(&line).replace('\0', " ")));
            }
        }
        found
    }

    fn matches(&self, process: &Path) -> bool {
        let holds = |file: &str, needle: &str| {
            let mut bytes = std::fs::read(process.join(file)).unwrap_or_default();
            // After the first thread has exited, the other threads show these.
            for thread in std::fs::read_dir(process.join("task")).into_iter().flatten().flatten() {
                bytes.extend(std::fs::read(thread.path().join(file)).unwrap_or_default());
            }
            !needle.is_empty() && bytes.windows(needle.len()).any(|window| window == needle.as_bytes())
        };
        let inside = std::fs::read_link(process.join("cwd")).is_ok_and(|cwd| {
            // The kernel marks a removed directory.
            cwd.to_string_lossy().starts_with(&*self.folder.to_string_lossy())
        });
        inside || holds("environ", &self.cookie) || holds("cmdline", &self.mark)
    }
}

/// True while any thread runs.
fn runs(process: &Path) -> bool {
    let of_thread = |thread: &Path| {
        // A name need not be UTF-8.
        std::fs::read(thread.join("stat")).is_ok_and(|stat| {
            !String::from_utf8_lossy(&stat).rsplit(") ").next().unwrap_or_default().starts_with(['Z', 'X'])
        })
    };
    let threads = std::fs::read_dir(process.join("task")).into_iter().flatten().flatten();
    threads.map(|thread| thread.path()).any(|thread| of_thread(&thread))
}

/// Counts children of this process that were not reaped.
pub(crate) fn zombies() -> usize {
    let own = std::process::id().to_string();
    let zombie = |process: &Path| {
        let stat = std::fs::read(process.join("stat")).unwrap_or_default();
        let stat = String::from_utf8_lossy(&stat);
        let mut fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        fields.next() == Some("Z") && fields.next() == Some(&own)
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| zombie(&entry.path())).count()
}
