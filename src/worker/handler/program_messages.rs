//! Messages of a program to the worker: JSON objects on descriptor 3, one per line.
//!
//! A line that is too long, is not JSON, has an unknown type or lacks a key is noted in the task's log and ignored. No line fails a
//! task, because the exit status decides its outcome. A request does fail after an invalid line, because that line may have been
//! its reply.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::pipe;
use tokio::process::ChildStdin;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::task::{Reply, ReplyStatus};
use journeyman_domain::limits::{
    PROCESS_OUTPUT_DRAIN, PROGRAM_IGNORED_NOTES_MAX, PROGRAM_LINE_BYTES_MAX, PROGRAM_REASONS_MAX,
    STAGED_CHECK_IN_SECONDS_MAX, STAGED_HANDLE_BYTES_MAX,
};
use journeyman_domain::refusal::Refusal;

use super::artifact::{ArtifactDeclaration, ArtifactKind, Optionality, expiry_error};
use super::process::{Launch, ProcessEnd, RunLimits, RunningProcess};
use super::safe_open::{self, Root};
use super::{Context, ExecuteError};

/// The types of messages, with the keys that each needs and those that it may have.
const MESSAGES: [(&str, &[&str], &[&str]); 10] = [
    ("artifact", &["name", "path"], &["contentType", "expires", "optional"]),
    ("directory", &["name", "path"], &["contentType", "expires", "optional"]),
    ("result", &["value"], &["name"]),
    ("answer", &[], &["json", "text", "base64", "path", "contentType", "status", "partial"]),
    ("step", &["name"], &[]),
    ("progress", &["done"], &["total", "text"]),
    ("pause", &[], &["path"]),
    ("work", &[], &["handle", "phase", "since", "now", "checkIn"]),
    ("redact", &["text"], &[]),
    ("reason", &["text"], &[]),
];

/// A message. Unknown keys are noted and ignored, so that a newer program works with an older worker, except in `answer`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum ProgramMessage {
    Artifact(Files),
    /// All files in a directory and its subdirectories; `name` prefixes their names.
    Directory(Files),
    /// A small JSON value that becomes an artifact, or the reply to a request.
    Result {
        #[serde(default = "default_result_name")]
        name: String,
        value: Value,
    },
    Answer(Answer),
    Step {
        name: String,
    },
    Progress {
        done: u64,
        total: Option<u64>,
        text: Option<String>,
    },
    /// Pauses the task. Once it is resumed, the worker creates the empty file `path` in the task directory, then reads on.
    Pause {
        #[serde(default = "default_resumed_file")]
        path: PathBuf,
    },
    Work(WorkMessage),
    /// A secret to redact in the task's log from here on, and each of its lines. Earlier output is not changed.
    Redact {
        text: SecretString,
    },
    /// Why a `check` program rejects the payload.
    Reason {
        text: String,
    },
}

/// What a program declares of a file or a directory.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Files {
    name: String,
    path: PathBuf,
    content_type: Option<String>,
    expires: Option<String>,
    #[serde(default)]
    optional: bool,
}

/// The reply to a request: one of `json`, `text`, `base64` and `path`. The last one that is not partial counts. Unknown keys
/// are rejected, because a misspelled key would lose the reply.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Answer {
    json: Option<Value>,
    text: Option<String>,
    base64: Option<String>,
    path: Option<PathBuf>,
    content_type: Option<String>,
    status: Option<String>,
    partial: bool,
}

/// What a staged program says about work that goes on.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkMessage {
    pub(super) handle: Option<String>,
    #[serde(default = "default_work_phase")]
    pub(super) phase: String,
    /// The time at which the phase began; `now` is when the external system said so.
    pub(super) since: Option<jiff::Timestamp>,
    pub(super) now: Option<jiff::Timestamp>,
    /// Seconds until the next look, or the next start.
    #[serde(default, deserialize_with = "seconds")]
    pub(super) check_in: Option<f64>,
}

fn default_work_phase() -> String {
    "running".to_owned()
}

fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    let seconds = Option::<f64>::deserialize(deserializer)?;
    let is_valid = seconds.is_none_or(|seconds| (0.0..=STAGED_CHECK_IN_SECONDS_MAX).contains(&seconds));
    if is_valid { Ok(seconds) } else { Err(D::Error::custom("not a time in seconds")) }
}

fn default_result_name() -> String {
    "public/result.json".to_owned()
}

fn default_resumed_file() -> PathBuf {
    PathBuf::from("resumed")
}

/// How a process ended, and what it sent.
pub(super) struct ProgramRun {
    pub(super) end: ProcessEnd,
    pub(super) report: ProgramReport,
}

/// What a program sent, besides artifacts and replies.
#[derive(Debug, Default)]
pub(super) struct ProgramReport {
    /// Why a `check` program rejected the payload.
    pub(super) reasons: Vec<String>,
    /// The last word about staged work.
    pub(super) work: Option<WorkMessage>,
    /// How many lines were ignored.
    pub(super) ignored_count: usize,
    /// Why the reply to a request is uncertain.
    reply_error: Option<String>,
}

impl ProgramReport {
    pub(super) fn check_reply(&self, program: &str) -> Result<(), ExecuteError> {
        let failed = |error| ExecuteError::failed(format!("{program}: invalid reply: {error}"));
        self.reply_error.as_ref().map_or(Ok(()), |error| Err(failed(error)))
    }
}

/// Runs a command to its end. That of a request may reply on descriptor 3.
pub(super) async fn run_command(launch: Launch<'_>, limits: RunLimits, context: &Context) -> io::Result<ProgramRun> {
    // Not for each command: to pass it, the standard library forks the worker instead of calling `posix_spawn`, which
    // doubles the time that the worker spends on a short task.
    if context.results().is_some() {
        return run_with_messages(launch, None, limits, context).await;
    }
    let end = RunningProcess::start(launch).await?.finish(limits, context).await?;
    write_notes(&end, context);
    Ok(ProgramRun { end, report: ProgramReport::default() })
}

fn write_notes(end: &ProcessEnd, context: &Context) {
    end.notes.iter().for_each(|note| context.log().write_note(note));
}

/// Runs a process to its end while it reads its document and sends messages on descriptor 3.
pub(super) async fn run_with_messages(
    mut launch: Launch<'_>,
    document: Option<&[u8]>,
    limits: RunLimits,
    context: &Context,
) -> io::Result<ProgramRun> {
    let (channel, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    let channel = pipe::Receiver::from_owned_fd(channel)?;
    launch.input = if document.is_some() { Stdio::piped() } else { Stdio::null() };
    launch.message_channel = Some(writer);
    let mut running = RunningProcess::start(launch).await?;
    let input = running.input.take();
    let ended = CancellationToken::new();
    let report = ProgramReport::default();
    let mut reader = MessageReader { context, ended: ended.clone(), line_count: 0, report, noted: BTreeSet::new() };
    let end = {
        let mut finish = std::pin::pin!(running.finish(limits, context));
        // A program need neither read its input nor close descriptor 3.
        let mut exchange = std::pin::pin!(async {
            tokio::join!(write_input(input, document.unwrap_or_default()), reader.read_all(channel));
        });
        // Messages before output: a `redact` message applies to the output that follows it.
        tokio::select! {
            biased;
            () = &mut exchange => finish.await?,
            end = &mut finish => {
                ended.cancel();
                if timeout(PROCESS_OUTPUT_DRAIN, exchange).await.is_err() {
                    context.log().write_note(
                        "a process outside the payload's group holds descriptor 3 open; the worker stops reading it",
                    );
                }
                end?
            }
        }
    };
    write_notes(&end, context);
    Ok(ProgramRun { end, report: reader.report })
}

/// A program may exit without reading its document.
async fn write_input(input: Option<ChildStdin>, document: &[u8]) {
    if let Some(mut input) = input
        && let Err(error) = input.write_all(document).await
    {
        tracing::debug!(%error, "program did not read its document");
    }
}

/// Reads the messages of one run of a program.
struct MessageReader<'a> {
    context: &'a Context,
    /// The process has ended, so that a pause need not be waited for.
    ended: CancellationToken,
    line_count: usize,
    report: ProgramReport,
    /// What was noted in the log as wrong.
    noted: BTreeSet<String>,
}

impl MessageReader<'_> {
    /// Reads until every writing end is closed. A partial reply is sent before the next message is read, so that a fast
    /// program waits for a slow client.
    async fn read_all(&mut self, channel: pipe::Receiver) {
        let mut channel = BufReader::new(channel);
        let (mut line, mut is_too_long) = (Vec::new(), false);
        let limit = PROGRAM_LINE_BYTES_MAX as u64 + 1;
        while matches!((&mut channel).take(limit).read_until(b'\n', &mut line).await, Ok(1..)) {
            let is_cut = line.len() > PROGRAM_LINE_BYTES_MAX && !line.ends_with(b"\n");
            if is_cut && !is_too_long {
                self.line_count += 1;
                self.reject_line(&format!("longer than {PROGRAM_LINE_BYTES_MAX} bytes"));
            } else if !is_cut && !is_too_long {
                self.handle_line(line.trim_ascii_end()).await;
            }
            is_too_long = is_cut;
            line.clear();
            // Steps are lines in the log.
            self.context.log().ready().await;
            // A program that writes without pause would keep the worker from stopping it.
            tokio::task::yield_now().await;
        }
    }

    async fn handle_line(&mut self, line: &[u8]) {
        if line.is_empty() {
            return;
        }
        self.line_count += 1;
        let fields: Map<String, Value> = match serde_json::from_slice(line) {
            Ok(fields) => fields,
            Err(error) if error.is_data() => return self.reject_line("not a JSON object"),
            Err(error) => return self.reject_line(&format!("not JSON, column {}", error.column())),
        };
        match shape_error(&fields) {
            Some(ShapeError::Rejected(wrong)) => return self.reject_line(&wrong),
            Some(ShapeError::Noted(wrong)) => self.note_once("", &wrong),
            None => {}
        }
        // serde's message may quote the line.
        let message: ProgramMessage = match serde_json::from_value(Value::Object(fields)) {
            Ok(message) => message,
            Err(_) => return self.reject_line("a key has a value of the wrong type"),
        };
        let is_reply = matches!(message, ProgramMessage::Answer(_) | ProgramMessage::Result { .. });
        match self.handle_message(message).await {
            Ok(()) => {}
            Err(wrong) if is_reply => self.reject_line(&wrong),
            Err(wrong) => self.ignore_line(&wrong),
        }
    }

    fn ignore_line(&mut self, wrong: &str) {
        self.report.ignored_count += 1;
        self.note_once("ignored: ", wrong);
    }

    fn note_once(&mut self, what: &str, wrong: &str) {
        let (line_count, log) = (self.line_count, self.context.log());
        if self.noted.len() > PROGRAM_IGNORED_NOTES_MAX || !self.noted.insert(wrong.to_owned()) {
            return;
        }
        if self.noted.len() <= PROGRAM_IGNORED_NOTES_MAX {
            log.write_note(&format!("descriptor 3, line {line_count}: {what}{wrong}"));
        } else {
            log.write_note("descriptor 3: more lines are not as they should be");
        }
    }

    /// Ignores a line that may have been the reply; `wrong` quotes nothing of the payload.
    fn reject_line(&mut self, wrong: &str) {
        self.ignore_line(wrong);
        if self.context.results().is_some() && self.report.reply_error.is_none() {
            let error = format!("descriptor 3, line {}: {wrong}", self.line_count);
            tracing::warn!(claim.run = %self.context.task().run, "program sent an invalid reply: {error}");
            self.report.reply_error = Some(error);
        }
    }

    async fn handle_message(&mut self, message: ProgramMessage) -> Result<(), String> {
        let context = self.context;
        let (name, kind, expires, optional) = match message {
            ProgramMessage::Artifact(Files { name, path, content_type, expires, optional }) => {
                (name, ArtifactKind::File { path, content_type }, expires, optional)
            }
            ProgramMessage::Directory(Files { name, path, content_type, expires, optional }) => {
                (name, ArtifactKind::Directory { path, content_type }, expires, optional)
            }
            ProgramMessage::Answer(answer) => return answer.send(context).await,
            // A request has no artifacts; its result is the reply.
            ProgramMessage::Result { name, value } if name == default_result_name() && context.results().is_some() => {
                let reply = Reply::ok(value.to_string().into_bytes());
                return context.set_reply(reply).map_err(|error| error.to_string());
            }
            ProgramMessage::Result { name, value } => {
                let path = PathBuf::from(format!("result-{}.json", self.line_count));
                // Follows no link: the program writes to this directory too.
                let file = File::create_new(context.workdir().join(&path));
                let written = file.and_then(|mut file| file.write_all(value.to_string().as_bytes()));
                written.map_err(|error| format!("result {name:?}: {}: {error}", path.display()))?;
                (name, ArtifactKind::File { path, content_type: Some("application/json".to_owned()) }, None, false)
            }
            ProgramMessage::Step { name } => {
                context.log().write_note(&format!("step: {name}"));
                context.set_progress(&name);
                return Ok(());
            }
            ProgramMessage::Progress { done, total, text } => {
                let total = total.map(|total| format!(" of {total}")).unwrap_or_default();
                let text = text.map(|text| format!(": {text}")).unwrap_or_default();
                context.log().write_note(&format!("progress: {done}{total}{text}"));
                context.set_progress(&format!("{done}{total}{text}"));
                return Ok(());
            }
            ProgramMessage::Pause { path } => return self.pause(&path).await,
            ProgramMessage::Work(work) => {
                let handle_bytes = work.handle.as_ref().map_or(0, String::len);
                if handle_bytes.max(work.phase.len()) > STAGED_HANDLE_BYTES_MAX {
                    return Err(format!("`handle` or `phase` is longer than {STAGED_HANDLE_BYTES_MAX} bytes"));
                }
                self.report.work = Some(work);
                return Ok(());
            }
            ProgramMessage::Redact { text } => {
                return context.log().add_secret(text.expose_secret()).map_err(|error| error.to_string());
            }
            ProgramMessage::Reason { text } => {
                if self.report.reasons.len() < PROGRAM_REASONS_MAX {
                    self.report.reasons.push(text);
                }
                return Ok(());
            }
        };
        let optionality = if optional { Optionality::Optional } else { Optionality::Required };
        declare_artifact(ArtifactDeclaration { expires, optionality, ..ArtifactDeclaration::new(name, kind) }, context)
    }

    async fn pause(&self, path: &Path) -> Result<(), String> {
        let context = self.context;
        if !matches!(path.components().collect::<Vec<_>>()[..], [Component::Normal(_)]) {
            return Err("`path` of a pause must be the name of a file in the task directory".to_owned());
        }
        let resumed = tokio::select! {
            biased;
            () = self.ended.cancelled() => return Ok(()),
            resumed = context.pause() => resumed,
        };
        match resumed {
            Ok(()) => {
                // Follows no link: the program writes to this directory too.
                let created = File::create_new(context.workdir().join(path)).map(drop);
                created.map_err(|error| format!("resumed, but cannot create {}: {error}", path.display()))
            }
            // The log says already that the payload has to end.
            Err(_) if context.cancellation().is_some() => Ok(()),
            Err(refused) => Err(refused.message),
        }
    }
}

impl Answer {
    async fn send(self, context: &Context) -> Result<(), String> {
        let Some(results) = context.results() else {
            return Err("this task is not a request: no reply is expected".to_owned());
        };
        let status = self.status.as_deref().map_or(Some(ReplyStatus::OK), ReplyStatus::parse);
        let status = status.ok_or("`status` must be 1 to 64 letters, digits, `_`, `-` and `.`")?;
        let body = match (self.json, self.text, self.base64, self.path) {
            (Some(json), None, None, None) => json.to_string().into_bytes(),
            (None, Some(text), None, None) => text.into_bytes(),
            (None, None, Some(encoded), None) => STANDARD.decode(encoded).map_err(|error| error.to_string())?,
            (None, None, None, Some(path)) => read_reply_file(&path, results.limits().body_bytes, context)?,
            (None, None, None, None) => b"null".to_vec(),
            _ => return Err("`answer` has more than one of `json`, `text`, `base64` and `path`".to_owned()),
        };
        let reply = Reply { status, body: body.into(), content_type: self.content_type };
        if !self.partial {
            return results.set_final(reply).map_err(|error| error.to_string());
        }
        match results.send_partial(reply).await {
            // A client that is gone misses no reply.
            Err(refused) if refused.refusal == Refusal::Gone => context.log().write_note(&refused.message),
            sent => return sent.map_err(|refused| refused.message),
        }
        Ok(())
    }
}

enum ShapeError {
    Rejected(String),
    /// The message is used without its unknown keys.
    Noted(String),
}

/// What a message lacks, and what of it is not known.
fn shape_error(fields: &Map<String, Value>) -> Option<ShapeError> {
    let Some(kind) = fields.get("type").and_then(Value::as_str) else {
        return Some(ShapeError::Rejected("a message needs \"type\"".to_owned()));
    };
    let Some((_, needed, possible)) = MESSAGES.iter().find(|(name, ..)| *name == kind) else {
        let known = MESSAGES.map(|(name, ..)| name).join(", ");
        return Some(ShapeError::Rejected(format!("unknown type {}; known are {known}", quoted(kind))));
    };
    let is_known = |key: &str| key == "type" || needed.contains(&key) || possible.contains(&key);
    let missing = needed.iter().filter(|key| !fields.contains_key(**key)).map(|key| quoted(key));
    let (missing, unknown): (Vec<_>, Vec<_>) =
        (missing.collect(), fields.keys().filter(|key| !is_known(key)).map(|key| quoted(key)).collect());
    let needs = (!missing.is_empty()).then(|| format!("{kind} needs {}", missing.join(" and ")));
    let has = (!unknown.is_empty()).then(|| format!("unknown key {}", unknown.join(" and ")));
    match (needs, has) {
        (None, None) => None,
        (Some(needs), None) => Some(ShapeError::Rejected(needs)),
        (Some(needs), Some(has)) => Some(ShapeError::Rejected(format!("{needs}; {has}"))),
        (None, Some(has)) if kind == "answer" => Some(ShapeError::Rejected(format!("{kind}: {has}"))),
        (None, Some(has)) => Some(ShapeError::Noted(format!("{kind}: {has}"))),
    }
}

/// A name in quotes. What is no name may be a part of the payload, and is not repeated.
fn quoted(name: &str) -> String {
    let is_name = name.len() <= 40 && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte));
    if is_name { format!("\"{name}\"") } else { "that is no name".to_owned() }
}

/// Reads one byte more than a reply may have, so that it is rejected by its size.
fn read_reply_file(path: &Path, max_bytes: usize, context: &Context) -> Result<Vec<u8>, String> {
    let opened = Root::open(context.workdir()).and_then(|root| root.open_below(path));
    let file = File::from(opened.map_err(|error| safe_open::classify_error(&error).1)?);
    let mut body = Vec::new();
    file.take(max_bytes as u64 + 1).read_to_end(&mut body).map_err(|error| error.to_string())?;
    Ok(body)
}

fn declare_artifact(mut declaration: ArtifactDeclaration, context: &Context) -> Result<(), String> {
    let definition = context.task().definition.json();
    let now = jiff::Timestamp::now();
    if let Some(why) = declaration.expires.as_ref().and_then(|expires| expiry_error(expires, definition, now)) {
        let note = format!("artifact {}: `expires`: {why}, so it expires with the task", declaration.name);
        context.log().write_note(&note);
        declaration.expires = None;
    }
    context.artifacts().declare(declaration).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUIDE: &str = include_str!("../../guide/handlers.md");

    fn text(error: Option<ShapeError>) -> String {
        match error {
            None => String::new(),
            Some(ShapeError::Rejected(text)) => format!("rejected: {text}"),
            Some(ShapeError::Noted(text)) => format!("noted: {text}"),
        }
    }

    #[test]
    fn b14_what_is_missing_or_unknown_is_named() {
        for (line, expected) in [
            (r#"{"type":"progress","percent":5}"#, r#"rejected: progress needs "done"; unknown key "percent""#),
            (r#"{"type":"artifact"}"#, r#"rejected: artifact needs "name" and "path""#),
            (r#"{"type":"step","name":"a","newer":1}"#, r#"noted: step: unknown key "newer""#),
            (r#"{"type":"answer","jsn":1}"#, r#"rejected: answer: unknown key "jsn""#),
            (r#"{"type":"answer","a secret":1}"#, "rejected: answer: unknown key that is no name"),
            (r#"{"kind":"step"}"#, r#"rejected: a message needs "type""#),
            (r#"{"type":"progress","done":1}"#, ""),
        ] {
            assert_eq!(text(shape_error(&serde_json::from_str(line).unwrap())), expected);
        }
        let unknown = text(shape_error(&serde_json::from_str(r#"{"type":"progres"}"#).unwrap()));
        assert!(
            unknown.starts_with(r#"rejected: unknown type "progres"; known are artifact, directory, "#),
            "{unknown}"
        );
    }

    #[test]
    fn b14_the_table_has_the_keys_of_each_type_and_the_guide_has_the_table() {
        for (kind, needed, possible) in MESSAGES {
            let value = |key: &str| match key {
                "optional" | "partial" => Value::Bool(true),
                "done" | "total" | "checkIn" => Value::from(1),
                "since" | "now" => Value::from("2026-11-26T08:00:00Z"),
                _ => Value::from("x"),
            };
            let with = |keys: &[&str]| {
                let keys = keys.iter().map(|key| ((*key).to_owned(), value(key)));
                Value::Object(keys.chain([("type".to_owned(), kind.into())]).collect())
            };
            let parse = |message: Value| serde_json::from_value::<ProgramMessage>(message);
            parse(with(needed)).unwrap();
            parse(with(&[needed, possible].concat())).unwrap();
            for (at, _) in needed.iter().enumerate() {
                assert!(parse(with(&[&needed[..at], &needed[at + 1..]].concat())).is_err(), "{kind}");
            }
            // A key that no type has is read as if it were not there, so its wrong value would be taken.
            for key in needed.iter().chain(possible).filter(|key| !matches!(**key, "value" | "json")) {
                let mut message = with(&[needed, possible].concat());
                message[key] = Value::Array(vec![Value::Null]);
                assert!(parse(message).is_err(), "{kind}: {key}");
            }
            let row = GUIDE.lines().find(|line| line.starts_with(&format!("| `{kind}` |")));
            let row = row.unwrap_or_else(|| panic!("the guide has no row of {kind}"));
            let cells: Vec<_> = row.split('|').map(str::trim).collect();
            let keys = |keys: &[&str]| keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            assert_eq!((cells[2], cells[3]), (keys(needed).as_str(), keys(possible).as_str()), "{kind}");
        }
    }
}
