//! Recorded exchanges (`fixtures/`) and a comparison that ignores ids and times.

use serde_json::{Map, Value};

pub(crate) struct Record {
    pub(crate) name: String,
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) request: Option<Value>,
    pub(crate) status: u16,
    pub(crate) answer: String,
    /// The `location` of the answer, without its host.
    pub(crate) headers: Vec<(String, String)>,
}

impl Record {
    pub(crate) fn read(folder: &str, name: &str) -> Self {
        let path = format!("{}/fixtures/{folder}/{name}.txt", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut lines = text.lines().filter_map(|line| line.strip_prefix('>')).map(str::trim_start);
        let mut first = lines.next().expect("a record starts with its request").split(' ');
        let (method, path) = (first.next().unwrap_or_default(), first.next().unwrap_or_default());
        let body: String = lines.skip_while(|line| !line.is_empty()).collect();
        let request = (!body.is_empty()).then(|| serde_json::from_str(&body).expect("a recorded body is JSON"));
        let head: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("< ")).collect();
        let status = head[0].trim_start_matches("HTTP/1.1 ").split(' ').next().unwrap_or_default();
        let headers = head[1..].iter().filter_map(|line| line.split_once(": "));
        let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
        let tail = &text[text.find("\n< ").expect("a record holds an answer")..];
        Self {
            name: format!("{folder}/{name}"),
            method: method.to_owned(),
            path: path.to_owned(),
            request,
            status: status.parse().expect("a status is a number"),
            answer: tail.split_once("\n\n").map_or("", |(_, body)| body).trim().to_owned(),
            headers,
        }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }
}

/// Replaces every id, time, secret and URL by a placeholder.
pub(crate) fn normalize(text: &str) -> Value {
    if text.is_empty() {
        return Value::Null;
    }
    value("", serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

fn value(key: &str, found: Value) -> Value {
    match (key, found) {
        ("accessToken" | "seed" | "signature", Value::String(_)) => "<secret>".into(),
        ("start" | "expiry", Value::Number(_)) => "<millis>".into(),
        ("putUrl", Value::String(_)) => "<signed address>".into(),
        ("url", Value::String(url)) if url.starts_with("http://127.0.0.1") => "<signed address>".into(),
        ("certificate", Value::String(text)) => normalize(&text),
        (_, Value::String(text)) => words(&text).into(),
        (_, Value::Array(items)) => Value::Array(items.into_iter().map(|item| value("", item)).collect()),
        (_, Value::Object(fields)) => {
            let fields = fields.into_iter().map(|(name, found)| {
                let found = value(&name, found);
                (name, found)
            });
            Value::Object(fields.collect::<Map<_, _>>())
        }
        (_, other) => other,
    }
}

fn words(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (shown, length) = address(rest).or_else(|| time(rest)).or_else(|| id(rest)).unwrap_or_else(|| {
            let end = rest.find(|letter| !is_word(letter)).unwrap_or(rest.len()).max(1);
            let end = (end..=rest.len()).find(|at| rest.is_char_boundary(*at)).unwrap_or(rest.len());
            (&rest[..end], end)
        });
        out.push_str(shown);
        rest = &rest[length..];
    }
    match out.split_once("/until/") {
        Some((head, tail)) if tail.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') => {
            format!("{head}/until/<epoch>")
        }
        _ => out,
    }
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '-' || letter == '_'
}

/// `http://127.0.0.1:28500`.
fn address(text: &str) -> Option<(&'static str, usize)> {
    let rest = text.strip_prefix("http://127.0.0.1:")?;
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    Some(("<root>", text.len() - rest.len() + digits))
}

/// `2026-11-21T10:20:44.549Z`
fn time(text: &str) -> Option<(&'static str, usize)> {
    let bytes = text.as_bytes();
    let fits = bytes.len() >= 20
        && bytes[..10].iter().enumerate().all(|(at, byte)| match at {
            4 | 7 => *byte == b'-',
            _ => byte.is_ascii_digit(),
        })
        && bytes[10] == b'T';
    if !fits {
        return None;
    }
    let end = text[11..].find(|letter: char| !letter.is_ascii_digit() && !":.".contains(letter))? + 11;
    if text[end..].starts_with('Z') {
        return Some(("<time>", end + 1));
    }
    text[end..].starts_with("+00:00").then_some(("<time>", end + 6))
}

/// A slugid or a UUID.
fn id(text: &str) -> Option<(&'static str, usize)> {
    let length = text.find(|letter| !is_word(letter)).unwrap_or(text.len());
    match length {
        22 => Some(("<slug>", 22)),
        36 if text[..36].matches('-').count() == 4 => Some(("<uuid>", 36)),
        44 => Some(("<hash>", 44)),
        _ => None,
    }
}
