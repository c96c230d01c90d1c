//! Reads secrets from files, systemd's credentials and environment variables. Errors never contain a secret, and buffers are wiped.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use secrecy::zeroize::Zeroizing;

use super::Environment;
use super::values::{Secret, SecretFile, trimmed};
use journeyman_domain::limits::SECRET_BYTES_MAX;

/// Why a secret cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {what} from {place}: {fault}")]
pub struct SecretError {
    /// What the place should hold.
    what: &'static str,
    place: String,
    fault: String,
}

impl SecretFile {
    /// Reads the secret.
    ///
    /// # Errors
    ///
    /// A secret that cannot be read, is empty or is far too large.
    pub fn load(&self, what: &'static str, environment: &Environment) -> Result<Secret, SecretError> {
        let error = |fault: &str| SecretError { what, place: self.to_string(), fault: fault.to_owned() };
        match self {
            Self::File(path) => read_file(path, what),
            Self::Systemd(name) => match systemd_credential_path(name, environment) {
                Some(path) => read_file(&path, what),
                None => Err(error(
                    "there is no CREDENTIALS_DIRECTORY; is LoadCredential= in the unit, and does systemd start this?",
                )),
            },
            Self::Variable(name) => {
                environment.get(name).map(Secret::new).ok_or_else(|| error("the variable is not set"))
            }
        }
    }
}

/// Whether every user of this host may read a file. A readable group is fine: services get secrets that way.
pub fn is_world_readable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

/// The file of a systemd credential; `None` if systemd passed none to this process.
pub fn systemd_credential_path(name: &str, environment: &Environment) -> Option<PathBuf> {
    environment.get("CREDENTIALS_DIRECTORY").map(|folder| Path::new(folder).join(name))
}

/// Reads a file that holds one secret and nothing else. White space around it is not part of it.
///
/// # Errors
///
/// Errors are those of [`SecretFile::load`].
pub fn read_file(path: &Path, what: &'static str) -> Result<Secret, SecretError> {
    let place = path.display().to_string();
    let unreadable = |error: std::io::Error| SecretError { what, place: place.clone(), fault: error.to_string() };
    let file = File::open(path).map_err(unreadable)?;
    if is_world_readable(path) {
        tracing::warn!(path = place, "every user of this host can read this secret; chmod 600 restricts it");
    }
    // Not grown while it is filled: that would leave copies behind.
    let bytes_max = SECRET_BYTES_MAX + 1;
    let mut text = Zeroizing::new(String::with_capacity(usize::try_from(bytes_max).unwrap_or_default() + 1));
    file.take(bytes_max).read_to_string(&mut text).map_err(unreadable)?;
    let fault = if text.len() as u64 > SECRET_BYTES_MAX {
        "it is far too large"
    } else if let Some(text) = trimmed(&text) {
        return Ok(Secret::new(text));
    } else {
        "it is empty"
    };
    Err(SecretError { what, place, fault: fault.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b13_a_newline_after_a_secret_its_path_or_its_variable_is_not_part_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        std::fs::write(&path, "canary-token\n").unwrap();
        let folder = format!("{}\n", folder.path().display());
        let environment = Environment::from_pairs(&[("CREDENTIALS_DIRECTORY", &folder), ("TOKEN", "canary-token\n")]);
        for place in [&format!("{}\n", path.display()), "systemd:token\n", "env:TOKEN\n"] {
            let secret = place.parse::<SecretFile>().unwrap().load("a token", &environment).unwrap();
            assert_eq!(secret.reveal(), "canary-token", "{place:?}");
        }
        assert!("\n".parse::<SecretFile>().is_err());
        std::fs::write(&path, " \n").unwrap();
        assert!(read_file(&path, "a token").unwrap_err().to_string().ends_with("it is empty"));
        assert_eq!(Environment::from_pairs(&[("TOKEN", " \n")]).get("TOKEN"), None);
    }
}
