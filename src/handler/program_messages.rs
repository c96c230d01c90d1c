//! Messages of a program to the worker: JSON objects on descriptor 3, one per line.
//!
//! A line that is too long, is not JSON or has an unknown type is noted in the task's log and ignored; so are lines after
//! [`PROGRAM_LINES_MAX`]. No line fails a task, because the exit status decides its outcome. A request does fail after an
//! invalid line, because that line may have been its reply.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::PathBuf;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde::de::IgnoredAny;
use tokio::task::JoinSet;

use crate::limits::{PROGRAM_IGNORED_LINES_LOGGED_MAX, PROGRAM_LINE_BYTES_MAX, PROGRAM_LINES_MAX, PROGRAM_REASONS_MAX};

use crate::domain::refusal::{CallError, Refusal};
use crate::task::{ArtifactBody, ArtifactErrorReason, Reply, ReplyError, ReplyStatus};

use super::artifact::{ArtifactDeclaration, ArtifactKind, Optionality, expires_after_task, guess_content_type};
use super::safe_open::{self, PathKind};
use super::{Context, ExecuteError};

/// A message. Unknown keys are ignored, so that a newer program works with an older worker, except in `answer`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub enum ProgramMessage {
    Artifact {
        name: String,
        path: PathBuf,
        #[serde(default)]
        content_type: Option<String>,
        #[serde(default)]
        expires: Option<String>,
        #[serde(default)]
        optional: bool,
    },
    /// All files in a directory and its subdirectories; `name` prefixes their names.
    Directory {
        name: String,
        path: PathBuf,
        #[serde(default)]
        expires: Option<String>,
        #[serde(default)]
        optional: bool,
    },
    /// A small JSON value that becomes an artifact, or the reply to a request.
    Result {
        #[serde(default = "default_result_name")]
        name: String,
        value: serde_json::Value,
    },
    /// The reply to a request: one of `json`, `text`, `base64` and `path`. The last one that is not partial counts.
    Answer {
        #[serde(default)]
        json: Option<serde_json::Value>,
        #[serde(default)]
        text: Option<String>,
        #[serde(default)]
        base64: Option<String>,
        #[serde(default)]
        path: Option<PathBuf>,
        #[serde(default)]
        content_type: Option<String>,
        #[serde(default)]
        status: Option<String>,
        #[serde(default)]
        partial: bool,
        // Collected to reject a misspelled key, which would lose the reply.
        #[serde(flatten)]
        unknown: BTreeMap<String, IgnoredAny>,
    },
    Link {
        name: String,
        artifact: String,
        #[serde(default)]
        content_type: Option<String>,
    },
    Reference {
        name: String,
        url: String,
        #[serde(default)]
        content_type: Option<String>,
    },
    /// An artifact that the program failed to create.
    Error {
        name: String,
        message: String,
    },
    Step {
        name: String,
    },
    Progress {
        done: u64,
        #[serde(default)]
        total: Option<u64>,
        #[serde(default)]
        text: Option<String>,
    },
    /// A secret to redact in the task's log from here on, and each of its lines. Earlier output is not changed.
    Redact {
        text: SecretString,
    },
    /// Why a `check` program rejects the payload.
    Reason {
        text: String,
    },
}

fn default_result_name() -> String {
    "public/result.json".to_owned()
}

/// Splits a stream into lines of bounded length; skips empty lines.
#[derive(Debug)]
pub struct LineSplitter {
    line_bytes_max: usize,
    partial: Vec<u8>,
    too_long: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub enum SplitLine<'a> {
    Whole(&'a [u8]),
    TooLong,
}

impl LineSplitter {
    #[must_use]
    pub const fn new(line_bytes_max: usize) -> Self {
        Self { line_bytes_max, partial: Vec::new(), too_long: false }
    }

    /// Whether the current line is longer than the limit.
    #[must_use]
    pub const fn is_too_long(&self) -> bool {
        self.too_long
    }

    pub fn push(&mut self, bytes: &[u8], mut line: impl FnMut(SplitLine<'_>)) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let (head, tail) = rest.split_at(end);
            self.append(head);
            self.finish(&mut line);
            rest = tail.get(1..).unwrap_or_default();
        }
        self.append(rest);
    }

    pub fn finish(&mut self, mut line: impl FnMut(SplitLine<'_>)) {
        if self.too_long {
            line(SplitLine::TooLong);
        } else if !self.partial.is_empty() {
            line(SplitLine::Whole(&self.partial));
        }
        self.too_long = false;
        self.partial.clear();
    }

    fn append(&mut self, bytes: &[u8]) {
        if self.too_long || self.partial.len() + bytes.len() > self.line_bytes_max {
            self.too_long = true;
            self.partial.clear();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }
}

/// Reads the messages of one run of a program.
#[derive(Debug)]
pub struct MessageReader<'a> {
    context: &'a Context,
    lines: LineSplitter,
    state: ReaderState,
    sending: JoinSet<Result<(), CallError>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProgramReport {
    /// Why a `check` program rejected the payload.
    pub reasons: Vec<String>,
    /// How many lines were ignored.
    pub ignored_count: usize,
    /// Why the reply to a request is uncertain.
    pub reply_error: Option<String>,
}

impl ProgramReport {
    pub(super) fn check_reply(&self, program: &str) -> Result<(), ExecuteError> {
        let failed = |error| ExecuteError::failed(format!("{program}: invalid reply: {error}"));
        self.reply_error.as_ref().map_or(Ok(()), |error| Err(failed(error)))
    }
}

#[derive(Debug, Default)]
struct ReaderState {
    line_count: usize,
    ignored_count: usize,
    reasons: Vec<String>,
    reply_error: Option<String>,
    pending_partials: VecDeque<Reply>,
}

impl<'a> MessageReader<'a> {
    #[must_use]
    pub fn new(context: &'a Context) -> Self {
        Self {
            context,
            lines: LineSplitter::new(PROGRAM_LINE_BYTES_MAX),
            state: ReaderState::default(),
            sending: JoinSet::new(),
        }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        let Self { context, lines, state, .. } = self;
        lines.push(bytes, |line| state.handle_line(&line, context));
    }

    /// Sends the partial replies received so far. The caller reads no further message meanwhile, so that a fast program
    /// waits for a slow client.
    ///
    /// Cancel safe: the next call waits for a reply in flight.
    pub async fn send_partials(&mut self) {
        loop {
            while let Some(sent) = self.sending.join_next().await {
                if let Ok(Err(refused)) = sent {
                    self.context.log().write_note(&refused.message);
                    // A client that is gone misses no reply.
                    if refused.refusal != Refusal::Gone {
                        self.state.fail_reply(&refused.message, self.context);
                    }
                }
            }
            let Some(reply) = self.state.pending_partials.pop_front() else { return };
            let context = self.context.clone();
            self.sending.spawn(async move { context.send_partial_reply(reply).await });
        }
    }

    #[must_use]
    pub fn finish(mut self) -> ProgramReport {
        let Self { context, lines, state, .. } = &mut self;
        lines.finish(|line| state.handle_line(&line, context));
        ProgramReport {
            reasons: self.state.reasons,
            ignored_count: self.state.ignored_count,
            reply_error: self.state.reply_error,
        }
    }
}

impl ReaderState {
    fn handle_line(&mut self, line: &SplitLine<'_>, context: &Context) {
        self.line_count += 1;
        if self.line_count > PROGRAM_LINES_MAX {
            if self.line_count == PROGRAM_LINES_MAX + 1 {
                let wrong = format!("descriptor 3: more than {PROGRAM_LINES_MAX} lines; further lines are ignored");
                context.log().write_note(&wrong);
                self.fail_reply(&wrong, context);
            }
            return;
        }
        let place = format!("descriptor 3, line {}", self.line_count);
        let (wrong, may_be_reply) = match line {
            SplitLine::TooLong => (format!("longer than {PROGRAM_LINE_BYTES_MAX} bytes"), true),
            SplitLine::Whole(bytes) => match serde_json::from_slice(bytes) {
                Ok(message) => {
                    let is_reply = matches!(message, ProgramMessage::Answer { .. } | ProgramMessage::Result { .. });
                    match self.handle_message(message, context) {
                        Ok(()) => return,
                        Err(wrong) => (wrong, is_reply),
                    }
                }
                // serde's message may quote the line.
                Err(error) if error.is_data() => ("unknown message type, or a missing or invalid key".to_owned(), true),
                Err(error) => (format!("not JSON, column {}", error.column()), true),
            },
        };
        if may_be_reply {
            self.fail_reply(&format!("{place}: {wrong}"), context);
        }
        self.ignored_count += 1;
        if self.ignored_count <= PROGRAM_IGNORED_LINES_LOGGED_MAX {
            context.log().write_note(&format!("{place}: ignored: {wrong}"));
        } else if self.ignored_count == PROGRAM_IGNORED_LINES_LOGGED_MAX + 1 {
            context.log().write_note("descriptor 3: further invalid lines are not logged");
        }
    }

    /// Records the first line that may have been a reply; `why` quotes nothing of the payload.
    fn fail_reply(&mut self, why: &str, context: &Context) {
        if context.results().is_some() && self.reply_error.is_none() {
            tracing::warn!(claim.run = %context.task().run, "program sent an invalid reply: {why}");
            self.reply_error = Some(why.to_owned());
        }
    }

    fn handle_message(&mut self, message: ProgramMessage, context: &Context) -> Result<(), String> {
        let (name, kind, expires, optional) = match message {
            ProgramMessage::Artifact { name, path, content_type, expires, optional } => {
                (name, ArtifactKind::File { path, content_type }, expires, optional)
            }
            ProgramMessage::Directory { name, path, expires, optional } => {
                (name, ArtifactKind::Directory { path }, expires, optional)
            }
            ProgramMessage::Answer { json, text, base64, path, content_type, status, partial, unknown } => {
                let Some(results) = context.results() else {
                    return Err("this task is not a request: no reply is expected".to_owned());
                };
                if let Some(key) = unknown.keys().next() {
                    return Err(format!("`answer` has an unknown key `{key}`"));
                }
                let body = reply_body(json, text, base64, path, context)?;
                let status = status.map_or(Ok(ReplyStatus::OK), |word| {
                    ReplyStatus::parse(&word)
                        .ok_or_else(|| "`status` must be 1 to 64 letters, digits, `_`, `-` and `.`".to_owned())
                })?;
                let reply = Reply { status, body: body.into(), content_type };
                if partial {
                    self.pending_partials.push_back(reply);
                    return Ok(());
                }
                return results.set_final(reply).map_err(|error| error.to_string());
            }
            // A request has no artifacts; its result is the reply.
            ProgramMessage::Result { name, value } if name == default_result_name() && context.results().is_some() => {
                let reply = Reply::ok(value.to_string().into_bytes());
                return context.set_reply(reply).map_err(|error| error.to_string());
            }
            ProgramMessage::Result { name, value } => {
                let bytes = value.to_string().into_bytes();
                (name, ArtifactKind::Inline { bytes, content_type: "application/json".to_owned() }, None, false)
            }
            ProgramMessage::Link { name, artifact, content_type } => {
                let content_type = content_type.unwrap_or_else(|| guess_content_type(artifact.as_ref()));
                (name, ArtifactKind::Body(ArtifactBody::Link { target: artifact, content_type }), None, false)
            }
            ProgramMessage::Reference { name, url, content_type } => {
                let content_type = content_type.unwrap_or_else(|| "application/octet-stream".to_owned());
                (name, ArtifactKind::Body(ArtifactBody::Reference { url, content_type }), None, false)
            }
            ProgramMessage::Error { name, message } => {
                let body = ArtifactBody::Error { reason: ArtifactErrorReason::Missing, message };
                (name, ArtifactKind::Body(body), None, false)
            }
            ProgramMessage::Step { name } => {
                context.log().write_note(&format!("step: {name}"));
                context.set_progress(&name);
                return Ok(());
            }
            ProgramMessage::Progress { done, total, text } => {
                let text = progress_text(done, total, text.as_deref());
                context.log().write_note(&text);
                context.set_progress(text.trim_start_matches("progress: "));
                return Ok(());
            }
            ProgramMessage::Redact { text } => {
                return context.log().add_secret(text.expose_secret()).map_err(|error| error.to_string());
            }
            ProgramMessage::Reason { text } => {
                if self.reasons.len() < PROGRAM_REASONS_MAX {
                    self.reasons.push(text);
                }
                return Ok(());
            }
        };
        let optionality = if optional { Optionality::Optional } else { Optionality::Required };
        declare_artifact(ArtifactDeclaration { name, kind, expires, optionality }, context)
    }
}

fn reply_body(
    json: Option<serde_json::Value>,
    text: Option<String>,
    base64: Option<String>,
    path: Option<PathBuf>,
    context: &Context,
) -> Result<Vec<u8>, String> {
    match (json, text, base64, path) {
        (Some(json), None, None, None) => Ok(json.to_string().into_bytes()),
        (None, Some(text), None, None) => Ok(text.into_bytes()),
        (None, None, Some(encoded), None) => STANDARD.decode(encoded).map_err(|error| error.to_string()),
        (None, None, None, Some(path)) => {
            let max_bytes = context.results().map_or(0, |results| results.limits().body_bytes);
            let opened = safe_open::open_root(context.workdir())
                .and_then(|root| safe_open::open(root.as_fd(), &path, PathKind::File));
            let file = File::from(opened.map_err(|error| safe_open::classify_error(&error, PathKind::File).1)?);
            let bytes = file.metadata().map_or(0, |about| about.len());
            if bytes > max_bytes as u64 {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                return Err(ReplyError::TooLarge { bytes, max: max_bytes }.to_string());
            }
            let mut body = Vec::new();
            file.take(max_bytes as u64 + 1).read_to_end(&mut body).map_err(|error| error.to_string())?;
            Ok(body)
        }
        (None, None, None, None) => Ok(b"null".to_vec()),
        _ => Err("`answer` has more than one of `json`, `text`, `base64` and `path`".to_owned()),
    }
}

fn declare_artifact(mut declaration: ArtifactDeclaration, context: &Context) -> Result<(), String> {
    let definition = &context.task().definition;
    if declaration.expires.as_ref().is_some_and(|expires| expires_after_task(expires, definition)) {
        context.log().write_note(&format!("artifact {}: expires with the task, not later", declaration.name));
        declaration.expires = None;
    }
    context.artifacts().declare(declaration).map_err(|error| error.to_string())
}

fn progress_text(done: u64, total: Option<u64>, text: Option<&str>) -> String {
    let total = total.map(|total| format!(" of {total}")).unwrap_or_default();
    let text = text.map(|text| format!(": {text}")).unwrap_or_default();
    format!("progress: {done}{total}{text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(chunks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut out) = (LineSplitter::new(PROGRAM_LINE_BYTES_MAX), Vec::new());
        let mut take = |line: SplitLine<'_>| {
            out.push(match line {
                SplitLine::Whole(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                SplitLine::TooLong => "too long".to_owned(),
            });
        };
        for chunk in chunks {
            lines.push(chunk, &mut take);
        }
        lines.finish(&mut take);
        out
    }

    #[test]
    fn lines_do_not_depend_on_how_the_stream_is_cut() {
        assert_eq!(split(&[b"ab", b"c\n\nd", b"e\nf"]), ["abc", "de", "f"]);
        assert_eq!(split(&[b"abc\n", b""]), ["abc"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_dropped_whole_and_the_next_one_is_read() {
        let chunk = vec![b'x'; PROGRAM_LINE_BYTES_MAX];
        assert_eq!(split(&[&chunk, b"y", &chunk, b"\nnext\n"]), ["too long", "next"]);
        assert_eq!(split(&[&chunk, b"\n"])[0].len(), PROGRAM_LINE_BYTES_MAX);
        assert_eq!(split(&[&chunk, b"y"]), ["too long"]);
    }
}
