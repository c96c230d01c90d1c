//! Copies of artifacts: with secrets redacted if they are logs, and compressed.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::task::TaskFile;
use crate::task::file::read_pieces;
use journeyman_platform::redact::{self, RedactFilter, SecretSet};

#[derive(Debug)]
pub(super) struct RedactedCopy {
    /// Unlinked, so that it needs no clean-up.
    pub(super) file: TaskFile,
    pub(super) bytes: u64,
    pub(super) redactions: u64,
}

pub(super) fn is_log(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, extension)| extension.eq_ignore_ascii_case("log"))
}

/// A redacted copy in `folder`; `None` if the file holds no secret, which writes nothing.
///
/// # Errors
///
/// Fails if the file cannot be read, or the copy not written.
pub(super) fn redacted_copy(
    file: &File,
    bytes: u64,
    own: Option<&SecretSet>,
    folder: &Path,
) -> io::Result<Option<RedactedCopy>> {
    if filter_file(file, bytes, own, |_| Ok(()))? == 0 {
        return Ok(None);
    }
    let copy = tempfile::tempfile_in(folder)?;
    let (mut written, mut to) = (0, &copy);
    let redactions = filter_file(file, bytes, own, |piece| {
        written += piece.len() as u64;
        to.write_all(piece)
    })?;
    Ok(Some(RedactedCopy { file: copy.into(), bytes: written, redactions }))
}

/// A file with this content, and its length.
pub(super) fn file_of(content: &[u8], folder: &Path) -> io::Result<(TaskFile, u64)> {
    let mut file = tempfile::tempfile_in(folder)?;
    file.write_all(content)?;
    Ok((file.into(), content.len() as u64))
}

/// A compressed copy in `folder`, and its length.
///
/// # Errors
///
/// Fails if the file cannot be read, or the copy not written.
pub(super) fn gzipped_copy(file: &File, bytes: u64, folder: &Path) -> io::Result<(TaskFile, u64)> {
    let mut packed = GzEncoder::new(tempfile::tempfile_in(folder)?, Compression::default());
    read_pieces(file, bytes, |piece| packed.write_all(piece))?;
    let packed = packed.finish()?;
    let length = packed.metadata()?.len();
    Ok((packed.into(), length))
}

fn filter_file(
    file: &File,
    bytes: u64,
    own: Option<&SecretSet>,
    mut each: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<u64> {
    let (mut filter, mut told) = (RedactFilter::default(), Vec::new());
    read_pieces(file, bytes, |piece| {
        redact::stream(&mut filter, own, piece, &mut told);
        each(&told)?;
        told.clear();
        Ok(())
    })?;
    redact::end_stream(&mut filter, own, &mut told);
    each(&told)?;
    Ok(filter.redaction_count())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use journeyman_domain::limits::REDACT_READ_BYTES;

    use std::io::Read as _;

    use super::*;

    #[test]
    fn secrets_are_redacted_across_pieces_and_a_file_without_secrets_is_not_copied() {
        let folder = tempfile::tempdir().unwrap();
        let mut own = SecretSet::default();
        own.add("cleanse-canary-5521");
        // Across the end of a piece, and at both ends of the file.
        let mut text = b"cleanse-canary-5521".to_vec();
        text.resize(REDACT_READ_BYTES - 7, b'x');
        text.extend_from_slice(b"cleanse-canary-5521\xff\x00 rest cleanse-canary-5521");
        let path = folder.path().join("build.log");
        std::fs::write(&path, &text).unwrap();
        let file = File::open(&path).unwrap();
        let cleansed = redacted_copy(&file, text.len() as u64, Some(&own), folder.path()).unwrap().unwrap();
        assert_eq!(cleansed.redactions, 3);
        let mut copy = vec![0; usize::try_from(cleansed.bytes).unwrap()];
        cleansed.file.read_exact_at(&mut copy, 0).unwrap();
        let expected = String::from_utf8_lossy(&text).replace("cleanse-canary-5521", redact::REPLACEMENT);
        assert_eq!(String::from_utf8_lossy(&copy), expected);
        assert_eq!((&*cleansed.file).read(&mut [0; 1]).unwrap(), 0, "there is no more of it");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no name is left");

        assert!(redacted_copy(&file, 0, Some(&own), folder.path()).unwrap().is_none());
        assert!(redacted_copy(&file, text.len() as u64, None, folder.path()).unwrap().is_none());
        assert!(redacted_copy(&file, text.len() as u64 + 1, Some(&own), folder.path()).is_err());
    }

    #[test]
    fn files_with_the_extension_log_are_logs() {
        for name in ["public/build.log", "a.LOG", ".log"] {
            assert!(is_log(name), "{name}");
        }
        for name in ["build.log.gz", "log", "public/log", "catalog", "build.log/x.txt"] {
            assert!(!is_log(name), "{name}");
        }
    }
}
