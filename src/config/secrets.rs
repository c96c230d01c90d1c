//! Reads the files that hold secrets. A secret is never part of an error.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use super::schema::{Client, Source};
use super::values::{self, Secret};
use crate::limits::SECRET_BYTES_MAX;

/// Why a secret could not be had.
#[derive(Debug, thiserror::Error)]
pub enum NoSecret {
    /// The file cannot be read.
    #[error("cannot read {what} from {}; is it there, and may this user read it?", path.display())]
    Unreadable {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// The file holds nothing that can be a secret.
    #[error("{} should hold {what}, and {fault}", path.display())]
    Unusable {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with its content.
        fault: &'static str,
    },
}

/// Who a source says we are.
#[derive(Debug, Clone)]
pub struct Credentials {
    /// The client id.
    pub client_id: String,
    /// The access token.
    pub access_token: Secret,
    /// The certificate of temporary credentials.
    pub certificate: Option<Secret>,
}

impl Credentials {
    /// Reads what a source needs; `None` where it names no client.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, is empty or is far too large.
    pub fn of_source(source: &Source) -> Result<Option<Self>, NoSecret> {
        let Some(client_id) = source.client_id.clone() else { return Ok(None) };
        let token = one(source.access_token.as_ref(), source.access_token_file.as_ref(), "an access token")?;
        let certificate = one(source.certificate.as_ref(), source.certificate_file.as_ref(), "a certificate")?;
        Ok(token.map(|access_token| Self { client_id, access_token, certificate }))
    }
}

/// Reads the access token of a client of the embedded queue.
///
/// # Errors
///
/// As [`Credentials::of_source`].
pub fn of_client(client: &Client) -> Result<Option<Secret>, NoSecret> {
    one(client.access_token.as_ref(), client.access_token_file.as_ref(), "an access token")
}

/// Whether every user of this machine may read a file. A group is not meant: services are given secrets that way.
#[must_use]
pub fn is_open(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

fn one(value: Option<&Secret>, file: Option<&values::File>, what: &'static str) -> Result<Option<Secret>, NoSecret> {
    match (value, file) {
        (Some(secret), _) => Ok(Some(secret.clone())),
        (None, Some(file)) => read(&file.0, what).map(Some),
        (None, None) => Ok(None),
    }
}

/// Reads a file that holds one secret and nothing else. White space around it is not part of it.
///
/// # Errors
///
/// As [`Credentials::of_source`].
pub fn read(path: &Path, what: &'static str) -> Result<Secret, NoSecret> {
    let unreadable = |source| NoSecret::Unreadable { what, path: path.to_owned(), source };
    let unusable = |fault| NoSecret::Unusable { what, path: path.to_owned(), fault };
    let file = File::open(path).map_err(unreadable)?;
    if is_open(path) {
        tracing::warn!(path = %path.display(), "every user of this machine can read this secret; chmod 600 hides it");
    }
    let mut text = String::new();
    file.take(SECRET_BYTES_MAX + 1).read_to_string(&mut text).map_err(unreadable)?;
    if text.len() as u64 > SECRET_BYTES_MAX {
        return Err(unusable("it is far too large"));
    }
    if text.trim().is_empty() {
        return Err(unusable("it is empty"));
    }
    Ok(Secret::new(&text))
}
