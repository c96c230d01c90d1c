//! The values that may stand in a configuration: text on the outside, a type that cannot be wrong inside.
//!
//! Each type names its format; the format is in the schema, so that one check serves the file, the environment and
//! the flags. Nothing here reads a file or the environment.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tracing_subscriber::filter::LevelFilter;

use crate::redact;

/// A value written as text. The error of [`Text::read`] is the end of a sentence: "expected …".
trait Text: Sized {
    /// The schema's `format`.
    const FORMAT: &'static str;
    /// What a value looks like, for messages.
    const EXAMPLE: &'static str;
    /// Reads it, or says what was expected.
    fn read(text: &str) -> Result<Self, String>;
    /// Writes it as it would stand in a file.
    fn write(&self) -> String;
}

macro_rules! text_value {
    ($($name:ident),+ $(,)?) => {
        $(
            impl Serialize for $name {
                fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                    out.serialize_str(&self.write())
                }
            }

            impl<'de> Deserialize<'de> for $name {
                fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                    let text = String::deserialize(from)?;
                    Self::read(&text).map_err(serde::de::Error::custom)
                }
            }

            impl JsonSchema for $name {
                fn schema_name() -> Cow<'static, str> {
                    stringify!($name).into()
                }

                fn json_schema(_: &mut SchemaGenerator) -> Schema {
                    json_schema!({ "type": "string", "format": Self::FORMAT })
                }

                fn inline_schema() -> bool {
                    true
                }
            }

            impl std::fmt::Display for $name {
                fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    out.write_str(&self.write())
                }
            }

            impl std::str::FromStr for $name {
                type Err = String;
                fn from_str(text: &str) -> Result<Self, String> {
                    Self::read(text)
                }
            }
        )+

        /// Checks a text against the format that the schema names.
        ///
        /// # Errors
        ///
        /// The end of a sentence: what was expected. A format that is not one of ours accepts everything.
        pub(super) fn check_format(format: &str, text: &str) -> Result<(), String> {
            $(if format == $name::FORMAT {
                return $name::read(text).map(drop);
            })+
            Ok(())
        }

        /// What a value of the format looks like.
        pub(super) fn example_of(format: &str) -> Option<&'static str> {
            $(if format == $name::FORMAT {
                return Some($name::EXAMPLE);
            })+
            None
        }
    };
}

text_value!(Span, Size, WorkerName, Queue, Url, Listen, File, SecretFile, Filter, Secret);

/// Checks a text that is well formed against the least that its key allows, which is written in the same way; `zero` is
/// what the schema says of nothing at all, where that has a meaning of its own.
///
/// # Errors
///
/// The end of a sentence: what was expected.
pub(super) fn check_least(format: &str, text: &str, least: &str, zero: Option<&str>) -> Result<(), String> {
    let magnitude = |text: &str| match format {
        Span::FORMAT => Span::read(text).map(|span| span.0.as_nanos()).ok(),
        Size::FORMAT => Size::read(text).map(|size| size.0.into()).ok(),
        _ => None,
    };
    let (Some(given), Some(bound)) = (magnitude(text), magnitude(least)) else { return Ok(()) };
    match zero {
        _ if given >= bound => Ok(()),
        Some(_) if given == 0 => Ok(()),
        Some(meaning) => Err(format!("\"{least}\" or more, or \"0s\", which is {meaning}")),
        None => Err(format!("\"{least}\" or more")),
    }
}

/// A length of time, such as `15m`, `1h 30m` or `500ms`. At most a hundred days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl Span {
    /// Reads a length of time of at least `least`.
    ///
    /// # Errors
    ///
    /// The end of a sentence: what was expected.
    pub fn read_from(text: &str, least: Duration) -> Result<Self, String> {
        let span = Self::read(text)?;
        check_least(Self::FORMAT, text, &Self(least).write(), None)?;
        Ok(span)
    }
}

const SPAN_MAX: Duration = Duration::from_secs(100 * 24 * 3600);

impl Text for Span {
    const FORMAT: &'static str = "span";
    const EXAMPLE: &'static str = "15m";

    fn read(text: &str) -> Result<Self, String> {
        let expected =
            "a length of time with its unit, such as \"15m\", \"1h 30m\" or \"500ms\"; hours are the largest";
        let span: jiff::SignedDuration = text.parse().map_err(|_| expected.to_owned())?;
        let span = Duration::try_from(span).map_err(|_| "a length of time that is not negative".to_owned())?;
        if span > SPAN_MAX {
            return Err("at most a hundred days (\"2400h\")".to_owned());
        }
        Ok(Self(span))
    }

    fn write(&self) -> String {
        jiff::SignedDuration::try_from(self.0).map_or_else(|_| "2400h".to_owned(), |span| format!("{span:#}"))
    }
}

/// A number of bytes, such as `64MiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u64);

const SIZE_UNITS: [(&str, u64); 8] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("kB", 1_000),
    ("KB", 1_000),
    ("B", 1),
];

impl Text for Size {
    const FORMAT: &'static str = "size";
    const EXAMPLE: &'static str = "64MiB";

    fn read(text: &str) -> Result<Self, String> {
        let expected = || "a number of bytes with its unit, such as \"64MiB\", \"2GiB\" or \"500kB\"".to_owned();
        let (digits, factor) = SIZE_UNITS
            .iter()
            .find_map(|(unit, factor)| text.strip_suffix(unit).map(|digits| (digits.trim_end(), *factor)))
            .ok_or_else(expected)?;
        let count: u64 = digits.parse().map_err(|_| expected())?;
        count.checked_mul(factor).map(Self).ok_or_else(expected)
    }

    fn write(&self) -> String {
        let fits = |(_, factor): &&(&str, u64)| self.0 != 0 && self.0.is_multiple_of(*factor);
        let (unit, factor) = SIZE_UNITS[..3].iter().find(fits).copied().unwrap_or(("B", 1));
        format!("{}{unit}", self.0 / factor)
    }
}

/// The longest worker group or worker id that today's queue accepts.
pub const WORKER_NAME_CHARS_MAX: usize = 38;
/// The longest worker group, worker id, provisioner id or worker type that the queue of the Azure era accepts.
pub const WORKER_NAME_CHARS_MAX_AZURE: usize = 22;

/// A worker group or a worker id. `{hostname}` and `{pid}` stand for this host's name and this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerName(String);

impl Text for WorkerName {
    const FORMAT: &'static str = "worker-name";
    const EXAMPLE: &'static str = "build-7";

    fn read(text: &str) -> Result<Self, String> {
        // A placeholder may become one character; the whole is checked again when it is filled in.
        let filled = text.replace("{hostname}", "h").replace("{pid}", "1");
        plain_name(&filled, WORKER_NAME_CHARS_MAX)?;
        Ok(Self(text.to_owned()))
    }

    fn write(&self) -> String {
        self.0.clone()
    }
}

impl WorkerName {
    /// The name with its placeholders filled in. What a host name holds that the protocol does not allow becomes `-`;
    /// a host name that is too long is cut, so that the whole has at most `chars_max` characters.
    #[must_use]
    pub fn fill(&self, hostname: &str, pid: u32, chars_max: usize) -> String {
        let with_pid = self.0.replace("{pid}", &pid.to_string());
        let Some(rest) = with_pid.len().checked_sub("{hostname}".len()) else { return with_pid };
        let room = chars_max.saturating_sub(rest).max(1);
        let short = hostname.split('.').next().unwrap_or(hostname);
        let clean: String =
            short.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' }).take(room).collect();
        let clean = if clean.is_empty() { "host".to_owned() } else { clean };
        with_pid.replace("{hostname}", &clean)
    }
}

fn plain_name(text: &str, chars_max: usize) -> Result<(), String> {
    let expected = || format!("1 to {chars_max} letters, digits, `_` or `-`");
    if let Some(odd) = text.chars().find(|c| !c.is_ascii_alphanumeric() && *c != '_' && *c != '-') {
        return Err(format!("{}, and there is a {odd:?}", expected()));
    }
    if text.is_empty() || text.len() > chars_max {
        return Err(format!("{}, and these are {}", expected(), text.len()));
    }
    Ok(())
}

/// A task queue: provisioner id and worker type, such as `build/linux-large`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    provisioner: String,
    worker_type: String,
}

impl Queue {
    /// The part before the slash.
    #[must_use]
    pub fn provisioner(&self) -> &str {
        &self.provisioner
    }

    /// The part after the slash.
    #[must_use]
    pub fn worker_type(&self) -> &str {
        &self.worker_type
    }
}

impl Text for Queue {
    const FORMAT: &'static str = "task-queue";
    const EXAMPLE: &'static str = "build/linux-large";

    fn read(text: &str) -> Result<Self, String> {
        let (provisioner, worker_type) = text
            .split_once('/')
            .ok_or("provisioner and worker type with a slash between, such as \"build/linux-large\"")?;
        for part in [provisioner, worker_type] {
            plain_name(part, WORKER_NAME_CHARS_MAX).map_err(|what| format!("{what}, on each side of the slash"))?;
        }
        Ok(Self { provisioner: provisioner.to_owned(), worker_type: worker_type.to_owned() })
    }

    fn write(&self) -> String {
        format!("{}/{}", self.provisioner, self.worker_type)
    }
}

/// An address on the web: `http` or `https`, a host, and no credentials, query or fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url(url::Url);

impl Url {
    /// The address without a slash at its end.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.0.as_str().trim_end_matches('/')
    }

    /// The address, taken apart.
    #[must_use]
    pub const fn parts(&self) -> &url::Url {
        &self.0
    }
}

impl Text for Url {
    const FORMAT: &'static str = "web-address";
    const EXAMPLE: &'static str = "https://tc.example.com";

    fn read(text: &str) -> Result<Self, String> {
        let expected = || "an address such as \"https://tc.example.com\"".to_owned();
        let url = url::Url::parse(text).map_err(|_| expected())?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(expected());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("an address without a user and password in it".to_owned());
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err("an address without `?` and `#`".to_owned());
        }
        Ok(Self(url))
    }

    fn write(&self) -> String {
        self.as_str().to_owned()
    }
}

/// Where to listen: an IP address and a port; port 0 lets the system choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl Text for Listen {
    const FORMAT: &'static str = "listen-address";
    const EXAMPLE: &'static str = "127.0.0.1:7070";

    fn read(text: &str) -> Result<Self, String> {
        text.parse()
            .map(Self)
            .map_err(|_| "an IP address and a port, such as \"127.0.0.1:7070\" or \"[::1]:7070\"".to_owned())
    }

    fn write(&self) -> String {
        self.0.to_string()
    }
}

/// A file or a folder. A relative one starts at the folder that the command was started in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File(pub PathBuf);

impl Text for File {
    const FORMAT: &'static str = "file";
    const EXAMPLE: &'static str = "/path/to/it";

    fn read(text: &str) -> Result<Self, String> {
        if text.is_empty() || text.contains('\0') {
            return Err("the name of a file or folder".to_owned());
        }
        Ok(Self(PathBuf::from(text)))
    }

    fn write(&self) -> String {
        self.0.display().to_string()
    }
}

/// Where a secret is read from: a file, `fd:N` for a descriptor that was handed down, or `systemd:NAME` for a credential of
/// the service's unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretFile {
    /// A file. A relative one starts at the folder that the command was started in.
    File(PathBuf),
    /// A descriptor of this process: a file or a pipe.
    Descriptor(i32),
    /// A file of `$CREDENTIALS_DIRECTORY`, which `LoadCredential=` and its kin fill.
    Systemd(String),
}

impl Text for SecretFile {
    const FORMAT: &'static str = "secret-file";
    const EXAMPLE: &'static str = "/path/to/it";

    fn read(text: &str) -> Result<Self, String> {
        if let Some(number) = text.strip_prefix("fd:") {
            let number = number.parse().ok().filter(|number| *number > 2);
            return number
                .map(Self::Descriptor)
                .ok_or_else(|| "fd: and a number from 3 on, such as \"fd:3\"".to_owned());
        }
        if let Some(name) = text.strip_prefix("systemd:") {
            let plain = !name.is_empty() && !name.contains(['/', '\0']) && !matches!(name, "." | "..");
            let expected = "systemd: and the name of a credential, such as \"systemd:access-token\"";
            return plain.then(|| Self::Systemd(name.to_owned())).ok_or_else(|| expected.to_owned());
        }
        File::read(text).map(|file| Self::File(file.0))
    }

    fn write(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Descriptor(number) => format!("fd:{number}"),
            Self::Systemd(name) => format!("systemd:{name}"),
        }
    }
}

/// Which log lines are written: a level, or `tracing` directives such as `info,journeyman::source=debug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter(String);

impl Filter {
    /// The directives.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Text for Filter {
    const FORMAT: &'static str = "log-filter";
    const EXAMPLE: &'static str = "info";

    fn read(text: &str) -> Result<Self, String> {
        let expected =
            "error, warn, info, debug, trace or off, or directives such as \"info,journeyman::source=debug\"";
        // Without this check any single word would be taken for the name of a module.
        // An empty word would pass for a level.
        let level = |word: &str| !word.is_empty() && word.parse::<LevelFilter>().is_ok();
        let plain = text.split(',').all(|part| match part.rsplit_once('=') {
            Some((target, word)) => !target.trim().is_empty() && level(word.trim()),
            None => level(part.trim()),
        });
        if plain && tracing_subscriber::EnvFilter::try_new(text).is_ok() {
            return Ok(Self(text.to_owned()));
        }
        Err(expected.to_owned())
    }

    fn write(&self) -> String {
        self.0.clone()
    }
}

/// Something that is never shown. What it was read from is not checked, it is masked wherever it is written, and no log
/// shows it while it is there. Its memory is wiped when it is dropped.
#[derive(Clone)]
pub struct Secret(Arc<Hidden>);

struct Hidden {
    text: secrecy::SecretString,
    _in_logs: redact::HiddenSecrets,
}

/// What stands in the place of a secret.
pub const MASK: &str = "********";

impl Secret {
    /// Takes a secret, without the white space around it.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let in_logs = redact::hide([text]);
        Self(Arc::new(Hidden { text: text.trim().to_owned().into(), _in_logs: in_logs }))
    }

    /// The secret itself, for the one place that needs it.
    #[must_use]
    pub fn reveal(&self) -> &str {
        use secrecy::ExposeSecret as _;
        self.0.text.expose_secret()
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(MASK)
    }
}

impl Text for Secret {
    const FORMAT: &'static str = "secret";
    const EXAMPLE: &'static str = MASK;

    fn read(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("a secret that is not empty".to_owned());
        }
        Ok(Self::new(text))
    }

    fn write(&self) -> String {
        MASK.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_as_it_was_read() {
        for text in ["0s", "15m", "1h 30m", "500ms"] {
            assert_eq!(Span::read(text).unwrap().write(), text);
        }
    }

    #[test]
    fn a_span_without_unit_or_below_zero_or_endless_is_refused() {
        for text in ["15", "-5s", "2401h", "", "soon"] {
            assert!(Span::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_know_both_kinds_of_unit_and_never_overflow() {
        assert_eq!(Size::read("64MiB").unwrap().0, 64 << 20);
        assert_eq!(Size::read("2 GB").unwrap().0, 2_000_000_000);
        assert_eq!(Size::read("64MiB").unwrap().write(), "64MiB");
        assert_eq!(Size::read("0B").unwrap().write(), "0B");
        for text in ["64", "MiB", "-1B", "99999999999999GiB", "1.5GiB"] {
            assert!(Size::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_worker_name_keeps_to_the_protocol_whatever_the_host_is_called() {
        let name = WorkerName::read("{hostname}-{pid}").unwrap();
        let filled = name.fill("ein.sehr-langer", 4711, 22);
        assert_eq!(filled, "ein-4711");
        let long = WorkerName::read("{hostname}").unwrap().fill(&"ä".repeat(80), 1, 22);
        assert_eq!(long, "-".repeat(22));
        let long = name.fill(&"h".repeat(80), 4711, 22);
        assert_eq!((long.len(), long.ends_with("-4711")), (22, true));
    }

    #[test]
    fn a_task_queue_has_two_parts_that_the_protocol_accepts() {
        assert_eq!(Queue::read("build/linux").unwrap().worker_type(), "linux");
        for text in ["build", "build/", "/linux", "a/b/c", "ä/b", &format!("a/{}", "b".repeat(39))] {
            assert!(Queue::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_address_with_a_password_is_refused() {
        for text in ["https://a:b@c.example", "ftp://x", "tc.example.com", "https://x/?a=b"] {
            assert!(Url::read(text).is_err(), "{text}");
        }
        assert_eq!(Url::read("http://127.0.0.1:7070/").unwrap().write(), "http://127.0.0.1:7070");
    }

    #[test]
    fn a_secret_is_read_from_a_file_a_descriptor_or_a_credential_and_never_from_a_word() {
        let read = |text: &str| SecretFile::read(text).map(|file| file.write());
        for text in ["/etc/token", "token", "fd:3", "systemd:access-token", "./fd:x"] {
            assert_eq!(read(text).as_deref(), Ok(text));
        }
        for text in ["", "fd:", "fd:2", "fd:-1", "fd:x", "systemd:", "systemd:../x", "systemd:.."] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_filter_is_a_level_or_directives() {
        assert!(Filter::read("info,journeyman::source=debug").is_ok());
        for text in ["loud", "info,", "x=loud"] {
            assert!(Filter::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        let secret = Secret::read(" s3cret\n").unwrap();
        assert_eq!((format!("{secret:?}"), secret.write(), secret.reveal()), (MASK.into(), MASK.into(), "s3cret"));
    }
}
