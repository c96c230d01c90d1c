//! What a program says to the worker while it runs: JSON objects, one a line, on its descriptor 3.
//!
//! Every line is taken by itself. One that is too long, is no JSON or says nothing known is told in the task's log and
//! changes nothing; so does one more than [`PROGRAM_LINES_MAX`]. No line can fail a task: that is what the exit status
//! is for. A request that somebody waits for is another matter: the line may have been its answer, so that it fails.

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

use crate::domain::refusal::Refusal;
use crate::source::{CallError, Reply, ReplyError, ReplyStatus, Results};

use super::artifact::{
    ArtifactDeclaration, ArtifactErrorReason, ArtifactKind, Optionality, expires_after_task, guess_content_type,
};
use super::safe_open::{self, PathKind, PathResolver};
use super::{Context, ExecuteError};

/// One line. Further keys are ignored, so that a newer program can talk to an older worker, but for those of an answer.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub enum ProgramMessage {
    /// A file of the task's folder is to be kept.
    Artifact {
        /// Its name as an artifact.
        name: String,
        /// Where it is, below the task's folder.
        path: PathBuf,
        /// Its media type; guessed from the extension if not given.
        #[serde(default)]
        content_type: Option<String>,
        /// When it may be thrown away; with the task if not given.
        #[serde(default)]
        expires: Option<String>,
        /// Lets the task succeed without it: where it is not there, or the queue refuses it.
        #[serde(default)]
        optional: bool,
    },
    /// All files in a folder of the task's folder, and below, are to be kept.
    Directory {
        /// What their names begin with.
        name: String,
        /// Where it is, below the task's folder.
        path: PathBuf,
        /// When they may be thrown away; with the task if not given.
        #[serde(default)]
        expires: Option<String>,
        /// Lets the task succeed without it: where it is not there, or the queue refuses it.
        #[serde(default)]
        optional: bool,
    },
    /// A small JSON value is to be kept, without a file.
    Result {
        /// Its name as an artifact.
        #[serde(default = "default_result_name")]
        name: String,
        /// The value.
        value: serde_json::Value,
    },
    /// The answer to a request; of `json`, `text`, `base64` and `path` one. The last one that is not partial counts.
    Answer {
        /// A JSON value.
        #[serde(default)]
        json: Option<serde_json::Value>,
        /// A text.
        #[serde(default)]
        text: Option<String>,
        /// Bytes in base64.
        #[serde(default)]
        base64: Option<String>,
        /// A file below the task's folder that holds it, for what is too long for a line.
        #[serde(default)]
        path: Option<PathBuf>,
        /// Its media type.
        #[serde(default)]
        content_type: Option<String>,
        /// How it went; `ok` if not given.
        #[serde(default)]
        status: Option<String>,
        /// Others follow: it is sent at once.
        #[serde(default)]
        partial: bool,
        /// Whatever else: a key that is misspelled must not cost somebody the answer.
        #[serde(flatten)]
        unknown: BTreeMap<String, IgnoredAny>,
    },
    /// Another name for an artifact.
    Link {
        /// The other name.
        name: String,
        /// The artifact it leads to.
        artifact: String,
        /// Its media type; guessed from the artifact's extension if not given.
        #[serde(default)]
        content_type: Option<String>,
    },
    /// A place elsewhere.
    Reference {
        /// Its name as an artifact.
        name: String,
        /// The place.
        url: String,
        /// Its media type.
        #[serde(default)]
        content_type: Option<String>,
    },
    /// An artifact that could not be made.
    Error {
        /// Its name.
        name: String,
        /// Why, for the task's author.
        message: String,
    },
    /// A new part of the work begins.
    Step {
        /// Its name.
        name: String,
    },
    /// How far it has got.
    Progress {
        /// How much is done.
        done: u64,
        /// Of how much, if that is known.
        #[serde(default)]
        total: Option<u64>,
        /// A word about it.
        #[serde(default)]
        text: Option<String>,
    },
    /// A text is to be replaced in the task's log from here on, in all the ways it may be encoded; each of its lines too.
    /// It takes at least 6 characters. Output that the program writes before it sends this is not changed any more.
    Redact {
        /// The text.
        text: SecretString,
    },
    /// Why the payload is refused; of a check only.
    Reason {
        /// What is wrong, and where.
        text: String,
    },
}

fn default_result_name() -> String {
    "public/result.json".to_owned()
}

/// Splits a stream into lines, and keeps no more of one than [`PROGRAM_LINE_BYTES_MAX`].
#[derive(Debug, Default)]
pub struct LineSplitter {
    partial: Vec<u8>,
    /// The line at hand is longer than the bound; the rest of it is dropped.
    too_long: bool,
}

/// A line as it was cut out of the stream.
#[derive(Debug, PartialEq, Eq)]
pub enum SplitLine<'a> {
    /// Whole.
    Whole(&'a [u8]),
    /// Longer than the bound; its content is gone.
    TooLong,
}

impl LineSplitter {
    /// Takes bytes and hands out the lines that they complete.
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

    /// Hands out what is left when nothing more comes.
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
        if self.too_long || self.partial.len() + bytes.len() > PROGRAM_LINE_BYTES_MAX {
            self.too_long = true;
            self.partial.clear();
        } else {
            self.partial.extend_from_slice(bytes);
        }
    }
}

/// Heeds the lines of one run of a program.
#[derive(Debug)]
pub struct MessageReader<'a> {
    context: &'a Context,
    lines: LineSplitter,
    state: ReaderState,
    /// The partial answer that is on its way.
    sending: JoinSet<Result<(), CallError>>,
}

/// What a run of a program told, apart from what went into its context.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProgramReport {
    /// Why the payload is refused.
    pub reasons: Vec<String>,
    /// How many lines were not understood.
    pub ignored_count: usize,
    /// Why what it was to answer to a request cannot be known for sure.
    pub reply_error: Option<String>,
}

impl ProgramReport {
    /// Says so where somebody waits for an answer that cannot be known; `who` names the program.
    pub(super) fn check_reply(&self, who: &str) -> Result<(), ExecuteError> {
        let failed = |why| ExecuteError::Failed(format!("{who}: its answer cannot be used: {why}"));
        self.reply_error.as_ref().map_or(Ok(()), |why| Err(failed(why)))
    }
}

#[derive(Debug, Default)]
struct ReaderState {
    line_count: usize,
    ignored_count: usize,
    reasons: Vec<String>,
    reply_error: Option<String>,
    /// Partial answers that were not sent yet.
    pending_partials: VecDeque<Reply>,
}

impl<'a> MessageReader<'a> {
    /// Declares artifacts in `context`, and writes to its log.
    #[must_use]
    pub fn new(context: &'a Context) -> Self {
        Self { context, lines: LineSplitter::default(), state: ReaderState::default(), sending: JoinSet::new() }
    }

    /// Takes bytes as they come.
    pub fn push(&mut self, bytes: &[u8]) {
        let Self { context, lines, state: heard, .. } = self;
        lines.push(bytes, |line| heard.handle_line(&line, context));
    }

    /// Sends the partial answers that came. While that takes its time nothing more is read, so that a program that is faster
    /// than whoever it answers waits.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: what is on its way stays so, and is waited for by the next call.
    pub async fn send_partials(&mut self) {
        loop {
            while let Some(sent) = self.sending.join_next().await {
                if let Ok(Err(refused)) = sent {
                    self.context.log().write_note(&refused.message);
                    // Whoever waits for no answer misses none.
                    if refused.refusal != Refusal::Gone {
                        self.state.fail_reply(&refused.message, &refused.message, self.context);
                    }
                }
            }
            let Some(reply) = self.state.pending_partials.pop_front() else { return };
            let context = self.context.clone();
            self.sending.spawn(async move { context.send_partial_reply(reply).await });
        }
    }

    /// Takes the end, and hands out what was told.
    #[must_use]
    pub fn finish(mut self) -> ProgramReport {
        let Self { context, lines, state: heard, .. } = &mut self;
        lines.finish(|line| heard.handle_line(&line, context));
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
                let wrong = format!("more than {PROGRAM_LINES_MAX} lines on descriptor 3; the rest is ignored");
                context.log().write_note(&wrong);
                self.fail_reply(&wrong, &wrong, context);
            }
            return;
        }
        let place = format!("descriptor 3, line {}", self.line_count);
        let breaks = |shown: &str, wrong: &str| (format!("{place}: {shown}"), format!("{place}: {wrong}"));
        let (wrong, broken) = match line {
            SplitLine::TooLong => {
                let wrong = format!("longer than {PROGRAM_LINE_BYTES_MAX} bytes");
                (wrong.clone(), Some(breaks(&wrong, &wrong)))
            }
            SplitLine::Whole(bytes) => match serde_json::from_slice(bytes) {
                Ok(message) => {
                    let answers = matches!(message, ProgramMessage::Answer { .. } | ProgramMessage::Result { .. });
                    match self.handle_message(message, context) {
                        Ok(()) => return,
                        Err(wrong) => (wrong.clone(), answers.then(|| breaks(&wrong, &wrong))),
                    }
                }
                Err(error) => {
                    // What it says in full may quote the line.
                    let shown = if error.is_data() { "it says nothing known" } else { "it is no JSON, or is cut off" };
                    let wrong = error.to_string();
                    (wrong.clone(), Some(breaks(shown, &wrong)))
                }
            },
        };
        if let Some((shown, why)) = broken {
            self.fail_reply(&why, &shown, context);
        }
        self.ignored_count += 1;
        if self.ignored_count <= PROGRAM_IGNORED_LINES_LOGGED_MAX {
            context.log().write_note(&format!("descriptor 3, line {}, is ignored: {wrong}", self.line_count));
        } else if self.ignored_count == PROGRAM_IGNORED_LINES_LOGGED_MAX + 1 {
            context.log().write_note("descriptor 3: further lines are ignored without a word");
        }
    }

    /// What may have been an answer is none. The first time counts, and the worker's log says so too, in the words of `shown`.
    fn fail_reply(&mut self, why: &str, shown: &str, context: &Context) {
        if context.results().is_some() && self.reply_error.is_none() {
            tracing::warn!(claim.run = %context.task().run, "the answer of a program cannot be used: {shown}");
            self.reply_error = Some(why.to_owned());
        }
    }

    fn handle_message(&mut self, message: ProgramMessage, context: &Context) -> Result<(), String> {
        let octets = || "application/octet-stream".to_owned();
        let (name, what, expires, optional) = match message {
            ProgramMessage::Artifact { name, path, content_type, expires, optional } => {
                (name, ArtifactKind::File { path, content_type }, expires, optional)
            }
            ProgramMessage::Directory { name, path, expires, optional } => {
                (name, ArtifactKind::Directory { path }, expires, optional)
            }
            ProgramMessage::Answer { json, text, base64, path, content_type, status, partial, unknown } => {
                let Some(replies) = context.results() else { return Err("nobody waits for an answer".to_owned()) };
                if let Some(key) = unknown.keys().next() {
                    return Err(format!("an answer has no `{key}`"));
                }
                let body = reply_body(json, text, base64, path, context)?;
                let status = status.map_or(Ok(ReplyStatus::OK), |word| {
                    ReplyStatus::parse(&word).ok_or_else(|| {
                        "the status is no word of at most 64 letters, digits, `_`, `-` and `.`".to_owned()
                    })
                })?;
                let reply = Reply { status, body: body.into(), content_type };
                if partial {
                    self.pending_partials.push_back(reply);
                    return Ok(());
                }
                return replies.set_final(reply).map_err(|error| error.to_string());
            }
            // A request has no artifacts; a result is what it asks for.
            ProgramMessage::Result { name, value } if name == default_result_name() && context.results().is_some() => {
                let reply = Reply::ok(value.to_string().into_bytes());
                return context.set_reply(reply).map_err(|error| error.to_string());
            }
            ProgramMessage::Result { name, value } => {
                let bytes = value.to_string().into_bytes();
                (name, ArtifactKind::Inline { bytes, content_type: "application/json".to_owned() }, None, false)
            }
            ProgramMessage::Link { name, artifact, content_type: given } => {
                let content_type = given.unwrap_or_else(|| guess_content_type(artifact.as_ref()));
                (name, ArtifactKind::Link { target: artifact, content_type }, None, false)
            }
            ProgramMessage::Reference { name, url, content_type } => {
                (name, ArtifactKind::Reference { url, content_type: content_type.unwrap_or_else(octets) }, None, false)
            }
            ProgramMessage::Error { name, message } => {
                (name, ArtifactKind::Error { reason: ArtifactErrorReason::Missing, message }, None, false)
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
        let need = if optional { Optionality::Optional } else { Optionality::Required };
        declare_artifact(ArtifactDeclaration { name, kind: what, expires, optionality: need }, context)
    }
}

/// What an answer says, where it says one thing.
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
            let most = context.results().map_or(0, Results::max_bytes);
            let opened = safe_open::open_root(context.workdir())
                .and_then(|root| safe_open::open(root.as_fd(), &path, PathKind::File, PathResolver::Kernel));
            let file = File::from(opened.map_err(|error| safe_open::open_error_message(&error))?);
            let bytes = file.metadata().map_or(0, |about| about.len());
            if bytes > most as u64 {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                return Err(ReplyError::TooLarge { bytes, most }.to_string());
            }
            let mut body = Vec::new();
            file.take(most as u64 + 1).read_to_end(&mut body).map_err(|error| error.to_string())?;
            Ok(body)
        }
        // An answer may be empty.
        (None, None, None, None) => Ok(b"null".to_vec()),
        _ => Err("it says more than one of `json`, `text`, `base64` and `path`".to_owned()),
    }
}

fn declare_artifact(mut declaration: ArtifactDeclaration, context: &Context) -> Result<(), String> {
    let definition = &context.task().definition;
    if declaration.expires.as_ref().is_some_and(|expires| expires_after_task(expires, definition)) {
        context.log().write_note(&format!("artifact {}: kept as long as the task, and no longer", declaration.name));
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
        let (mut lines, mut out) = (LineSplitter::default(), Vec::new());
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
    fn lines_come_out_however_the_stream_is_cut() {
        assert_eq!(split(&[b"ab", b"c\n\nd", b"e\nf"]), ["abc", "de", "f"]);
        assert_eq!(split(&[b"abc\n", b""]), ["abc"]);
    }

    #[test]
    fn a_line_that_is_too_long_is_dropped_whole_and_the_next_one_counts() {
        let chunk = vec![b'x'; PROGRAM_LINE_BYTES_MAX];
        assert_eq!(split(&[&chunk, b"y", &chunk, b"\nnext\n"]), ["too long", "next"]);
        assert_eq!(split(&[&chunk, b"\n"])[0].len(), PROGRAM_LINE_BYTES_MAX);
        assert_eq!(split(&[&chunk, b"y"]), ["too long"]);
    }
}
