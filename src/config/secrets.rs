//! Reads secrets from files, inherited descriptors and systemd's credentials. Errors never contain a secret, and buffers are wiped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use secrecy::zeroize::Zeroizing;

use super::Environment;
use super::schema::Client;
use super::values::{Secret, SecretFile};
use crate::limits::{SECRET_BYTES_MAX, SECRET_READ_TIMEOUT};

/// Why a secret cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
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

/// The credentials of a Taskcluster client.
#[derive(Debug, Clone)]
pub struct ClientCredentials {
    /// The client id.
    pub client_id: String,
    /// The access token.
    pub access_token: Secret,
    /// The certificate of temporary credentials.
    pub certificate: Option<Secret>,
}

/// The keys of a section that name a client of Taskcluster.
#[derive(Debug, Clone, Copy)]
pub struct CredentialKeys<'a> {
    pub client_id: Option<&'a String>,
    pub access_token: Option<&'a Secret>,
    pub access_token_file: Option<&'a SecretFile>,
    pub certificate: Option<&'a Secret>,
    pub certificate_file: Option<&'a SecretFile>,
}

impl CredentialKeys<'_> {
    /// Whether one of them can only be read by the process that inherits it.
    pub fn uses_descriptor(&self) -> bool {
        let files = [self.access_token_file, self.certificate_file];
        files.into_iter().flatten().any(|file| matches!(file, SecretFile::Descriptor(_)))
    }

    /// Reads the credentials; `None` if no client is named.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, is empty or is far too large.
    pub fn read(&self, environment: &Environment) -> Result<Option<ClientCredentials>, SecretError> {
        let Some(client_id) = self.client_id.cloned() else { return Ok(None) };
        let token = read_one_of(self.access_token, self.access_token_file, "an access token", environment)?;
        let certificate = read_one_of(self.certificate, self.certificate_file, "a certificate", environment)?;
        Ok(token.map(|access_token| ClientCredentials { client_id, access_token, certificate }))
    }
}

/// Reads the URI of the AMQP broker; `None` if none is configured.
///
/// # Errors
///
/// As [`CredentialKeys::read`].
pub fn amqp_uri(amqp: &super::schema::Amqp, environment: &Environment) -> Result<Option<Secret>, SecretError> {
    read_one_of(amqp.uri.as_ref(), amqp.uri_file.as_ref(), "an AMQP address", environment)
}

/// Reads the token for commands over HTTP; `None` if none is configured.
///
/// # Errors
///
/// As [`CredentialKeys::read`].
pub fn http_token(http: &super::schema::Http, environment: &Environment) -> Result<Option<Secret>, SecretError> {
    read_one_of(None, http.token_file.as_ref(), "a token", environment)
}

/// Reads the access token of a client of the embedded queue.
///
/// # Errors
///
/// As [`CredentialKeys::read`].
pub fn client_token(client: &Client, environment: &Environment) -> Result<Option<Secret>, SecretError> {
    read_one_of(client.access_token.as_ref(), client.access_token_file.as_ref(), "an access token", environment)
}

/// Whether every user of this host may read a file. A readable group is fine: services get secrets that way.
pub fn is_world_readable(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

fn read_one_of(
    value: Option<&Secret>,
    file: Option<&SecretFile>,
    what: &'static str,
    environment: &Environment,
) -> Result<Option<Secret>, SecretError> {
    match (value, file) {
        (Some(secret), _) => Ok(Some(secret.clone())),
        (None, Some(SecretFile::File(path))) => read(path, what).map(Some),
        (None, Some(SecretFile::Descriptor(number))) => read_descriptor(*number, what).map(Some),
        (None, Some(SecretFile::Systemd(name))) => match systemd_credential_path(name, environment) {
            Some(path) => read(&path, what).map(Some),
            None => Err(SecretError::Unusable {
                what,
                path: PathBuf::from(format!("systemd:{name}")),
                fault: "there is no CREDENTIALS_DIRECTORY; is LoadCredential= in the unit, and does systemd start this?",
            }),
        },
        (None, None) => Ok(None),
    }
}

/// The file of a systemd credential; `None` if systemd passed none to this process.
pub fn systemd_credential_path(name: &str, environment: &Environment) -> Option<PathBuf> {
    environment.get("CREDENTIALS_DIRECTORY").map(|folder| Path::new(folder).join(name))
}

/// Secrets of descriptors, which are read once and then closed, so that no payload inherits them. A reload reads them here.
static DESCRIPTORS: Mutex<BTreeMap<i32, Secret>> = Mutex::new(BTreeMap::new());

/// Reads an inherited descriptor and closes it.
fn read_descriptor(number: i32, what: &'static str) -> Result<Secret, SecretError> {
    let label = || PathBuf::from(format!("fd:{number}"));
    let mut held = DESCRIPTORS.lock();
    if let Some(secret) = held.get(&number) {
        return Ok(secret.clone());
    }
    let unreadable = |source| SecretError::Unreadable { what, path: label(), source };
    if !is_inherited(number) {
        return Err(unreadable(std::io::Error::other("this process did not inherit it")));
    }
    let file = File::open(format!("/proc/self/fd/{number}")).map_err(unreadable)?;
    let (sender, read) = std::sync::mpsc::channel();
    // The writer may never close it; then the thread is left behind.
    std::thread::spawn(move || drop(sender.send(read_all(file))));
    let text = match read.recv_timeout(SECRET_READ_TIMEOUT) {
        Ok(text) => text.map_err(unreadable)?,
        Err(_) => return Err(unreadable(std::io::Error::other("its writer did not close it in time"))),
    };
    let secret = parse_secret(&text, || (what, label()))?;
    // Inherited, so nothing else in this process owns it.
    if let Err(error) = nix::unistd::close(number) {
        return Err(unreadable(error.into()));
    }
    held.insert(number, secret.clone());
    Ok(secret)
}

/// Whether a descriptor was inherited: those that the process opens itself are closed on exec.
fn is_inherited(number: i32) -> bool {
    const CLOSE_ON_EXEC: u32 = 0o2_000_000;
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags = about.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & CLOSE_ON_EXEC == 0)
}

/// Reads a file that holds one secret and nothing else. White space around it is not part of it.
///
/// # Errors
///
/// As [`CredentialKeys::read`].
pub fn read(path: &Path, what: &'static str) -> Result<Secret, SecretError> {
    let unreadable = |source| SecretError::Unreadable { what, path: path.to_owned(), source };
    let file = File::open(path).map_err(unreadable)?;
    if is_world_readable(path) {
        tracing::warn!(path = %path.display(), "every user of this host can read this secret; chmod 600 restricts it");
    }
    let text = read_all(file).map_err(unreadable)?;
    parse_secret(&text, || (what, path.to_owned()))
}

/// At most one byte more than a secret may have.
fn read_all(file: File) -> std::io::Result<Zeroizing<String>> {
    // Not grown while it is filled: that would leave copies behind.
    let most = SECRET_BYTES_MAX + 1;
    let mut text = Zeroizing::new(String::with_capacity(usize::try_from(most).unwrap_or_default() + 1));
    file.take(most).read_to_string(&mut text)?;
    Ok(text)
}

fn parse_secret(text: &str, place: impl FnOnce() -> (&'static str, PathBuf)) -> Result<Secret, SecretError> {
    let fault = if text.len() as u64 > SECRET_BYTES_MAX {
        "it is far too large"
    } else if text.trim().is_empty() {
        "it is empty"
    } else {
        return Ok(Secret::new(text));
    };
    let (what, path) = place();
    Err(SecretError::Unusable { what, path, fault })
}
