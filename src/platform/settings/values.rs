//! The types of configuration values: text in a file, the environment or a flag, and a validated type in the code.

use std::fmt;
use std::marker::PhantomData;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tracing_subscriber::filter::LevelFilter;

use crate::redact;
use journeyman_domain::lane::dispatcher::Rate;
use journeyman_domain::limits::WEBHOOK_RATE_ATTEMPTS_MAX;

/// A value that is written as text.
trait Text: Sized {
    /// Parses the text. The error completes the sentence "expected …".
    fn read(text: &str) -> Result<Self, String>;
    /// Writes the text that [`Text::read`] parses.
    fn write(&self) -> String;
    /// What the schema adds to the kind of the value.
    #[cfg(debug_assertions)]
    fn bounds() -> String {
        String::new()
    }
}

struct TextVisitor<T> {
    example: &'static str,
    value: PhantomData<T>,
}

impl<T: Text> Visitor<'_> for TextVisitor<T> {
    type Value = T;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "a text in quotes such as \"{}\"", self.example)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::read(text).map_err(E::custom)
    }
}

macro_rules! text_value {
    ($([$($min:ident)?] $name:ty, $kind:literal, $example:literal;)+) => {
        $(
            impl $(<const $min: u64>)? Serialize for $name {
                fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                    out.serialize_str(&self.write())
                }
            }

            impl<'de, $(const $min: u64)?> Deserialize<'de> for $name {
                fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                    from.deserialize_str(TextVisitor { example: $example, value: PhantomData })
                }
            }

            #[cfg(debug_assertions)]
            impl $(<const $min: u64>)? schemars::JsonSchema for $name {
                fn schema_name() -> std::borrow::Cow<'static, str> {
                    stringify!($name).into()
                }

                fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                    schemars::json_schema!({ "type": "string", "title": format!("{}{}", $kind, Self::bounds()) })
                }

                fn inline_schema() -> bool {
                    true
                }
            }

            impl $(<const $min: u64>)? fmt::Display for $name {
                fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                    out.write_str(&self.write())
                }
            }

            impl $(<const $min: u64>)? FromStr for $name {
                type Err = String;
                fn from_str(text: &str) -> Result<Self, String> {
                    Self::read(text)
                }
            }
        )+
    };
}

// The kind is what the reference shows, and the example is part of messages.
text_value! {
    [MIN_MS] Span<MIN_MS>, "time with unit", "15m";
    [MIN_MS] OptionalSpan<MIN_MS>, "time with unit", "15m";
    [MIN] Size<MIN>, "bytes with unit", "64MiB";
    [] WorkerName, "name", "build-7";
    [] Queue, "provisioner/worker-type", "build/linux-large";
    [] Url, "web address", "https://tc.example.com";
    [] WebhookUrl, "web address", "https://example.com/hook";
    [] AttemptRate, "attempts and a time", "10/s";
    [] ServiceAddress, "web address or unix:PATH", "http://127.0.0.1:8080";
    [] Listen, "address and port", "127.0.0.1:7070";
    [] File, "path", "/path/to/it";
    [] SecretFile, "path, systemd:NAME or env:NAME", "/path/to/it";
    [] Filter, "level or directives", "info";
}

/// A duration such as `15m`, `1h 30m` or `500ms`, from `MIN_MS` milliseconds to 100 days.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span<const MIN_MS: u64 = 0>(pub Duration);

/// A duration as [`Span`], or `0s` for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OptionalSpan<const MIN_MS: u64 = 0>(pub Option<Duration>);

const SPAN_MAX: Duration = Duration::from_secs(100 * 24 * 3600);

fn read_span(text: &str) -> Result<Duration, String> {
    let expected = "a duration with its unit, such as \"15m\", \"1h 30m\" or \"500ms\"; the largest unit is the hour";
    let span: jiff::SignedDuration = text.parse().map_err(|_| expected.to_owned())?;
    let span = Duration::try_from(span).map_err(|_| "a duration that is not negative".to_owned())?;
    if span > SPAN_MAX {
        return Err("at most 100 days (\"2400h\")".to_owned());
    }
    Ok(span)
}

fn write_span(span: Duration) -> String {
    jiff::SignedDuration::try_from(span).map_or_else(|_| "2400h".to_owned(), |span| format!("{span:#}"))
}

impl<const MIN_MS: u64> Text for Span<MIN_MS> {
    fn read(text: &str) -> Result<Self, String> {
        let span = read_span(text)?;
        let min = Duration::from_millis(MIN_MS);
        if span < min { Err(format!("\"{}\" or more", write_span(min))) } else { Ok(Self(span)) }
    }

    fn write(&self) -> String {
        write_span(self.0)
    }

    #[cfg(debug_assertions)]
    fn bounds() -> String {
        if MIN_MS == 0 { String::new() } else { format!(", from {}", write_span(Duration::from_millis(MIN_MS))) }
    }
}

impl<const MIN_MS: u64> Text for OptionalSpan<MIN_MS> {
    fn read(text: &str) -> Result<Self, String> {
        if read_span(text)?.is_zero() {
            return Ok(Self(None));
        }
        let span = Span::<MIN_MS>::read(text).map_err(|expected| format!("{expected}, or \"0s\" to disable it"))?;
        Ok(Self(Some(span.0)))
    }

    fn write(&self) -> String {
        write_span(self.0.unwrap_or_default())
    }

    #[cfg(debug_assertions)]
    fn bounds() -> String {
        format!("{}, or 0s", Span::<MIN_MS>::bounds())
    }
}

/// A number of bytes, such as `64MiB`, from `MIN`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size<const MIN: u64 = 0>(pub u64);

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

fn write_size(bytes: u64) -> String {
    let fits = |(_, factor): &&(&str, u64)| bytes != 0 && bytes.is_multiple_of(*factor);
    let (unit, factor) = SIZE_UNITS[..3].iter().find(fits).copied().unwrap_or(("B", 1));
    format!("{}{unit}", bytes / factor)
}

impl<const MIN: u64> Text for Size<MIN> {
    fn read(text: &str) -> Result<Self, String> {
        let expected = || "a number of bytes with its unit, such as \"64MiB\", \"2GiB\" or \"500kB\"".to_owned();
        let (digits, factor) = SIZE_UNITS
            .iter()
            .find_map(|(unit, factor)| text.strip_suffix(unit).map(|digits| (digits.trim_end(), *factor)))
            .ok_or_else(expected)?;
        let count: u64 = digits.parse().map_err(|_| expected())?;
        let bytes = count.checked_mul(factor).ok_or_else(expected)?;
        if bytes < MIN { Err(format!("\"{}\" or more", write_size(MIN))) } else { Ok(Self(bytes)) }
    }

    fn write(&self) -> String {
        write_size(self.0)
    }

    #[cfg(debug_assertions)]
    fn bounds() -> String {
        if MIN == 0 { String::new() } else { format!(", from {}", write_size(MIN)) }
    }
}

/// The longest worker group or worker id of the claimWork dialect.
pub const WORKER_NAME_CHARS_MAX: usize = 38;
/// The longest worker group, worker id, provisioner id or worker type of the Azure dialect.
pub const WORKER_NAME_CHARS_MAX_AZURE: usize = 22;

/// A worker group or a worker id, in which `{hostname}` and `{pid}` are placeholders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerName(String);

impl Text for WorkerName {
    fn read(text: &str) -> Result<Self, String> {
        let filled = text.replace("{hostname}", "h").replace("{pid}", "1");
        plain_name(&filled, WORKER_NAME_CHARS_MAX)?;
        Ok(Self(text.to_owned()))
    }

    fn write(&self) -> String {
        self.0.clone()
    }
}

impl WorkerName {
    /// Fills in the placeholders. A character that the protocol does not allow becomes `-`, and the host name is cut so that
    /// the result has at most `chars_max` characters.
    pub fn fill(&self, hostname: &str, pid: u32, chars_max: usize) -> String {
        let with_pid = self.0.replace("{pid}", &pid.to_string());
        let Some(rest) = with_pid.len().checked_sub("{hostname}".len()) else { return with_pid };
        let hostname_max = chars_max.saturating_sub(rest).max(1);
        let short = hostname.split('.').next().unwrap_or(hostname);
        let clean: String = short
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' })
            .take(hostname_max)
            .collect();
        let clean = if clean.is_empty() { "host".to_owned() } else { clean };
        with_pid.replace("{hostname}", &clean)
    }
}

fn plain_name(text: &str, chars_max: usize) -> Result<(), String> {
    let expected = || format!("1 to {chars_max} letters, digits, `_` or `-`");
    if let Some(odd) = text.chars().find(|c| !c.is_ascii_alphanumeric() && *c != '_' && *c != '-') {
        return Err(format!("{}; {odd:?} is not allowed", expected()));
    }
    if text.is_empty() || text.len() > chars_max {
        return Err(format!("{}; this has {}", expected(), text.len()));
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
    pub fn provisioner(&self) -> &str {
        &self.provisioner
    }

    pub fn worker_type(&self) -> &str {
        &self.worker_type
    }
}

impl Text for Queue {
    fn read(text: &str) -> Result<Self, String> {
        let (provisioner, worker_type) = text
            .split_once('/')
            .ok_or("provisioner and worker type separated by a slash, such as \"build/linux-large\"")?;
        for part in [provisioner, worker_type] {
            plain_name(part, WORKER_NAME_CHARS_MAX).map_err(|what| format!("{what}, on each side of the slash"))?;
        }
        Ok(Self { provisioner: provisioner.to_owned(), worker_type: worker_type.to_owned() })
    }

    fn write(&self) -> String {
        format!("{}/{}", self.provisioner, self.worker_type)
    }
}

/// An `http` or `https` URL without credentials, query and fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url(url::Url);

impl Url {
    /// The URL without a trailing slash.
    pub fn as_str(&self) -> &str {
        self.0.as_str().trim_end_matches('/')
    }

    pub const fn parts(&self) -> &url::Url {
        &self.0
    }
}

impl Text for Url {
    fn read(text: &str) -> Result<Self, String> {
        let expected = || "a URL such as \"https://tc.example.com\"".to_owned();
        let url = url::Url::parse(text).map_err(|_| expected())?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(expected());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("a URL without a user and password".to_owned());
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err("a URL without `?` and `#`".to_owned());
        }
        Ok(Self(url))
    }

    fn write(&self) -> String {
        self.as_str().to_owned()
    }
}

/// The URL of a webhook, which may have a query. It is shown without its path, which may be a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookUrl(url::Url);

impl fmt::Debug for WebhookUrl {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.write())
    }
}

impl WebhookUrl {
    pub const fn parts(&self) -> &url::Url {
        &self.0
    }
}

impl Text for WebhookUrl {
    fn read(text: &str) -> Result<Self, String> {
        let url = url::Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
        let url = url.ok_or_else(|| "a URL such as \"https://example.com/hook\"".to_owned())?;
        if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() {
            return Err("a URL without a user, a password and `#`".to_owned());
        }
        Ok(Self(url))
    }

    fn write(&self) -> String {
        let (url, origin) = (self.0.as_str(), self.0.origin().ascii_serialization());
        if url.len() <= origin.len() + 1 { url.to_owned() } else { format!("{origin}/{MASK}") }
    }
}

/// How many attempts may begin within a second, a minute or an hour, such as `10/s`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttemptRate(pub Rate);

const RATE_UNITS: [(&str, Duration); 3] =
    [("s", Duration::from_secs(1)), ("m", Duration::from_secs(60)), ("h", Duration::from_secs(3600))];

impl Text for AttemptRate {
    fn read(text: &str) -> Result<Self, String> {
        let expected = || {
            format!(
                "1 to {WEBHOOK_RATE_ATTEMPTS_MAX} attempts within a second, a minute or an hour, such as \"10/s\", \
                 \"100/m\" or \"1000/h\""
            )
        };
        let (attempts, unit) = text.split_once('/').ok_or_else(expected)?;
        let attempts = attempts.trim().parse().ok().filter(|count| (1..=WEBHOOK_RATE_ATTEMPTS_MAX).contains(count));
        let per = RATE_UNITS.iter().find(|(name, _)| *name == unit.trim()).map(|(_, per)| *per);
        attempts.zip(per).map(|(attempts, per)| Self(Rate { attempts, per })).ok_or_else(expected)
    }

    fn write(&self) -> String {
        let unit = RATE_UNITS.iter().find(|(_, per)| *per == self.0.per).map_or("s", |(name, _)| name);
        format!("{}/{unit}", self.0.attempts)
    }
}

/// The address of a service: a URL, or `unix:` and the path of a socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceAddress {
    Url(Url),
    Socket(PathBuf),
}

impl ServiceAddress {
    pub fn socket(&self) -> Option<&Path> {
        match self {
            Self::Url(_) => None,
            Self::Socket(path) => Some(path),
        }
    }
}

impl Text for ServiceAddress {
    fn read(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) => File::read(path).map(|file| Self::Socket(file.0)),
            None => Url::read(text).map(Self::Url),
        }
    }

    fn write(&self) -> String {
        match self {
            Self::Url(url) => url.write(),
            Self::Socket(path) => format!("unix:{}", path.display()),
        }
    }
}

/// An IP address and a port to listen on; with port 0 the system chooses one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listen(pub SocketAddr);

impl Text for Listen {
    fn read(text: &str) -> Result<Self, String> {
        text.parse()
            .map(Self)
            .map_err(|_| "an IP address and a port, such as \"127.0.0.1:7070\" or \"[::1]:7070\"".to_owned())
    }

    fn write(&self) -> String {
        self.0.to_string()
    }
}

/// The path of a file or a directory, relative to the current directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File(pub PathBuf);

impl Text for File {
    fn read(text: &str) -> Result<Self, String> {
        let path = trimmed(text).filter(|path| !path.contains('\0'));
        path.map(|path| Self(PathBuf::from(path))).ok_or_else(|| "the path of a file or directory".to_owned())
    }

    fn write(&self) -> String {
        self.0.display().to_string()
    }
}

/// Where a secret is read from: a file, `systemd:NAME` (a credential of the unit) or `env:NAME` (an environment variable). The
/// configuration never holds the secret itself, because its files are copied and committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SecretFile {
    File(PathBuf),
    /// A file of `$CREDENTIALS_DIRECTORY`, as `LoadCredential=` puts it there.
    Systemd(String),
    Variable(String),
}

/// Whether a text is an address or a key in the place of the file that should hold it.
pub(super) fn is_inline_secret(text: &str) -> bool {
    text.contains("://") || text.contains("whsec_")
}

impl Text for SecretFile {
    fn read(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(name) = text.strip_prefix("systemd:") {
            let plain = !name.is_empty() && !name.contains(['/', '\0']) && !matches!(name, "." | "..");
            let expected = "systemd: and the name of a credential, such as \"systemd:access-token\"";
            return plain.then(|| Self::Systemd(name.to_owned())).ok_or_else(|| expected.to_owned());
        }
        if let Some(name) = text.strip_prefix("env:") {
            return Ok(Self::Variable(name.to_owned()));
        }
        if is_inline_secret(text) {
            return Err("the path of a file that holds it, which is kept out of the configuration".to_owned());
        }
        File::read(text).map(|file| Self::File(file.0))
    }

    fn write(&self) -> String {
        match self {
            Self::File(path) => path.display().to_string(),
            Self::Systemd(name) => format!("systemd:{name}"),
            Self::Variable(name) => format!("env:{name}"),
        }
    }
}

/// A log level, or `tracing` directives such as `info,journeyman_worker::source=debug`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter(String);

impl Filter {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Text for Filter {
    fn read(text: &str) -> Result<Self, String> {
        let expected =
            "error, warn, info, debug, trace or off, or directives such as \"info,journeyman_worker::source=debug\"";
        // EnvFilter takes any single word for the name of a module, and an empty word for a level.
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

/// The text without the white space around it, as of a line of a file; `None` if nothing is left.
pub fn trimmed(text: &str) -> Option<&str> {
    Some(text.trim()).filter(|text| !text.is_empty())
}

/// A secret: masked wherever it is written, redacted from every log while it exists, and wiped from memory on drop.
#[derive(Clone)]
pub struct Secret(Arc<Hidden>);

struct Hidden {
    text: secrecy::SecretString,
    _in_logs: redact::HiddenSecrets,
}

/// What is shown instead of a secret.
pub const MASK: &str = "********";

impl Secret {
    /// Keeps the text without the white space around it.
    pub fn new(text: &str) -> Self {
        let in_logs = redact::hide([text]);
        Self(Arc::new(Hidden { text: text.trim().to_owned().into(), _in_logs: in_logs }))
    }

    pub fn reveal(&self) -> &str {
        use secrecy::ExposeSecret as _;
        self.0.text.expose_secret()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(MASK)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from).map(|text| Self::new(&text))
    }
}

/// Reads a whole number from `MIN` to `MAX`.
///
/// # Errors
///
/// Any other value.
pub fn whole_number<'de, D, T, const MIN: i64, const MAX: i64>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    let number = Some(i64::deserialize(from)?).filter(|number| (MIN..=MAX).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| D::Error::custom(format!("a whole number from {MIN} to {MAX}")))
}

#[expect(clippy::expect_used, reason = "every built-in value is parsed by a test")]
pub fn built_in<T: FromStr<Err = String>>(text: &str) -> T {
    text.parse().expect("a built-in value is valid")
}

/// Merges `upper` into `lower`, objects key by key.
pub fn merge_json(lower: &mut serde_json::Value, upper: serde_json::Value) {
    use serde_json::Value;
    match (lower, upper) {
        (Value::Object(lower), Value::Object(upper)) => {
            for (key, value) in upper {
                merge_json(lower.entry(key).or_insert(Value::Null), value);
            }
        }
        (lower, upper) => *lower = upper,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_is_written_as_it_was_read() {
        for text in ["0s", "15m", "1h 30m", "500ms"] {
            assert_eq!(Span::<0>::read(text).unwrap().write(), text);
        }
    }

    #[test]
    fn a_span_without_unit_or_below_zero_or_endless_is_refused() {
        for text in ["15", "-5s", "2401h", "", "soon"] {
            assert!(Span::<0>::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_know_both_kinds_of_unit_and_never_overflow() {
        assert_eq!(Size::<0>::read("64MiB").unwrap().0, 64 << 20);
        assert_eq!(Size::<0>::read("2 GB").unwrap().0, 2_000_000_000);
        assert_eq!(Size::<0>::read("64MiB").unwrap().write(), "64MiB");
        assert_eq!(Size::<0>::read("0B").unwrap().write(), "0B");
        for text in ["64", "MiB", "-1B", "99999999999999GiB", "1.5GiB"] {
            assert!(Size::<0>::read(text).is_err(), "{text}");
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
    fn a_secret_is_a_file_a_credential_or_a_variable() {
        let read = |text: &str| SecretFile::read(text).map(|file| file.write());
        for text in ["/etc/token", "token", "systemd:access-token", "env:TOKEN", "./env:x"] {
            assert_eq!(read(text).as_deref(), Ok(text));
        }
        for text in ["", "systemd:", "systemd:../x", "systemd:..", "amqp://u:p@host", "https://host/secret", "whsec_a"]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_filter_is_a_level_or_directives() {
        assert!(Filter::read("info,journeyman_worker::source=debug").is_ok());
        for text in ["loud", "info,", "x=loud"] {
            assert!(Filter::read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        let secret = Secret::new(" s3cret\n");
        assert_eq!((format!("{secret:?}"), secret.reveal()), (MASK.into(), "s3cret"));
    }
}
