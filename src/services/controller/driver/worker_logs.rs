//! Log files of the workers of this host, bounded in size and number.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use journeyman_domain::limits::{
    DRIVER_ENDED_LOGS_MAX, DRIVER_LOG_BYTES_KEPT, DRIVER_LOG_BYTES_MAX, DRIVER_LOG_TAIL_BYTES_MAX,
};

const TRUNCATION_MARK: &[u8] = b"[truncated]\n";

pub(super) struct WorkerLogs {
    pub(super) folder: PathBuf,
}

impl WorkerLogs {
    pub(super) fn file_name(id: &str) -> String {
        format!("{id}.log")
    }

    fn path(&self, id: &str) -> PathBuf {
        self.folder.join(Self::file_name(id))
    }

    pub(super) fn open(&self, id: &str) -> io::Result<File> {
        OpenOptions::new().create(true).append(true).open(self.path(id))
    }

    pub(super) fn tail(&self, id: &str) -> String {
        let words = read_tail(&self.path(id), DRIVER_LOG_TAIL_BYTES_MAX);
        String::from_utf8_lossy(&words.unwrap_or_default()).into_owned()
    }

    pub(super) fn truncate(&self, id: &str) {
        let path = self.path(id);
        if std::fs::metadata(&path).is_ok_and(|about| about.len() > DRIVER_LOG_BYTES_MAX)
            && let Err(error) = truncate_file(&path)
        {
            tracing::warn!(worker = id, %error, "cannot truncate the log of a worker");
        }
    }

    pub(super) fn prune(&self, is_ended: impl Fn(&str) -> bool) {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        let logs = entries.filter(|path| path.extension().is_some_and(|kind| kind == "log"));
        let ended = logs.filter(|path| path.file_stem().and_then(|id| id.to_str()).is_some_and(&is_ended));
        let mut ended: Vec<_> =
            ended.filter_map(|path| Some((std::fs::metadata(&path).ok()?.modified().ok()?, path))).collect();
        ended.sort_unstable();
        for (_, path) in ended.iter().rev().skip(DRIVER_ENDED_LOGS_MAX) {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::debug!(%error, path = %path.display(), "cannot remove an old log");
            }
        }
    }
}

fn read_tail(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let from = file.metadata()?.len().saturating_sub(most);
    file.seek(SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn truncate_file(path: &Path) -> io::Result<()> {
    let kept = read_tail(path, DRIVER_LOG_BYTES_KEPT)?;
    // Keep whole lines.
    let from = kept.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    let mut file = OpenOptions::new().append(true).open(path)?;
    file.set_len(0)?;
    file.write_all(&[TRUNCATION_MARK, kept.get(from..).unwrap_or_default()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_is_too_long_keeps_its_end_and_whoever_writes_goes_on_after_it() {
        let folder = tempfile::tempdir().unwrap();
        let logs = WorkerLogs { folder: folder.path().to_owned() };
        let mut writer = logs.open("a").unwrap();
        let line = [b"x".repeat(1023), b"\n".to_vec()].concat();
        for _ in 0..DRIVER_LOG_BYTES_MAX / 1024 {
            writer.write_all(&line).unwrap();
        }
        logs.truncate("a");
        assert_eq!(writer.metadata().unwrap().len(), DRIVER_LOG_BYTES_MAX, "it may be as long");
        writer.write_all(b"the last line\n").unwrap();
        logs.truncate("a");
        writer.write_all(b"and one more\n").unwrap();
        let left = std::fs::read(folder.path().join("a.log")).unwrap();
        assert!(left.starts_with(&[TRUNCATION_MARK, &line].concat()), "from the beginning of a line");
        assert!(left.ends_with(b"x\nthe last line\nand one more\n"));
        let most = usize::try_from(DRIVER_LOG_BYTES_KEPT).unwrap() + TRUNCATION_MARK.len() + 32;
        assert!(left.len() <= most && left.len() > most / 2, "{}", left.len());
        assert!(logs.tail("a").ends_with("and one more\n"));
        assert_eq!(logs.tail("b"), "");
    }

    #[test]
    fn of_workers_that_have_ended_so_many_logs_are_kept_the_latest() {
        let folder = tempfile::tempdir().unwrap();
        let logs = WorkerLogs { folder: folder.path().to_owned() };
        let begin = |id: &str, second: usize| {
            let file = logs.open(id).unwrap();
            let at = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(second as u64);
            file.set_modified(at).unwrap();
        };
        begin("there", 0);
        for number in 0..DRIVER_ENDED_LOGS_MAX + 2 {
            begin(&format!("{number}"), number + 1);
        }
        std::fs::write(folder.path().join("0.json"), "").unwrap();
        logs.prune(|id| id != "there");
        let is_left = |name: &str| folder.path().join(name).exists();
        assert!(is_left("there.log") && is_left("0.json"), "others are none of its business");
        assert!(!is_left("0.log") && !is_left("1.log") && is_left("2.log"));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), DRIVER_ENDED_LOGS_MAX + 2);
    }
}
