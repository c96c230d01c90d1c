//! Downloaded content, by a key that says what it is.

use std::fs::File;
use std::io;
use std::sync::Arc;

use tempfile::NamedTempFile;

use super::{CacheStore, DOWNLOADS_DIR, TEMPORARY_DIR, USED_NOW, file_name_of};

/// Content that is not complete yet. Dropping it removes it.
#[derive(Debug)]
pub struct NewDownload {
    file: NamedTempFile,
    store: Arc<CacheStore>,
}

impl CacheStore {
    /// Opens the content of a key, which is used now. It stays readable while it is open, even if it is removed. Blocks.
    pub fn find_download(&self, key: &str) -> io::Result<Option<File>> {
        match File::open(self.dir(DOWNLOADS_DIR)?.join(file_name_of(key))) {
            Ok(file) => {
                rustix::fs::futimens(&file, &USED_NOW)?;
                Ok(Some(file))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes content that is not what its key says. Blocks.
    pub fn remove_download(&self, key: &str) -> io::Result<()> {
        self.remove(&self.dir(DOWNLOADS_DIR)?.join(file_name_of(key)))
    }

    /// Blocks.
    pub fn new_download(self: &Arc<Self>) -> io::Result<NewDownload> {
        Ok(NewDownload { file: NamedTempFile::new_in(self.dir(TEMPORARY_DIR)?)?, store: Arc::clone(self) })
    }
}

impl NewDownload {
    /// The file, which has no content at first.
    pub fn file(&self) -> &File {
        self.file.as_file()
    }

    /// Keeps the content under a key; without one it is gone once the file is closed. Blocks.
    pub fn finish(self, key: Option<&str>) -> io::Result<File> {
        let Some(key) = key else { return Ok(self.file.into_file()) };
        self.file.as_file().sync_data()?;
        let path = self.store.dir(DOWNLOADS_DIR)?.join(file_name_of(key));
        self.file.persist(path).map_err(io::Error::from)
    }
}
