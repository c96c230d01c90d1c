//! Messages of a program to the worker: JSON objects on descriptor 3, one per line.
//!
//! A line that is too long, is not JSON or has an unknown type is noted in the task's log and ignored. No line fails a task,
//! because the exit status decides its outcome. A request does fail after an invalid line, because that line may have been
//! its reply.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use secrecy::{ExposeSecret as _, SecretString};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
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

use super::artifact::{ArtifactDeclaration, ArtifactKind, Optionality, expires_after_task};
use super::process::{Launch, ProcessEnd, RunLimits, RunningProcess};
use super::safe_open;
use super::{Context, ExecuteError};

/// A message. Unknown keys are ignored, so that a newer program works with an older worker, except in `answer`.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", rename_all_fields = "camelCase")]
enum ProgramMessage {
    Artifact {
        name: String,
        path: PathBuf,
        content_type: Option<String>,
        expires: Option<String>,
        #[serde(default)]
        optional: bool,
    },
    /// All files in a directory and its subdirectories; `name` prefixes their names.
    Directory {
        name: String,
        path: PathBuf,
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

/// The reply to a request: one of `json`, `text`, `base64` and `path`. The last one that is not partial counts. Unknown keys
/// are rejected, because a misspelled key would lose the reply.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
struct Answer {
    json: Option<serde_json::Value>,
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
    let mut reader = MessageReader { context, ended: ended.clone(), line_count: 0, report };
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
        let message: ProgramMessage = match serde_json::from_slice(line) {
            Ok(message) => message,
            // serde's message may quote the line.
            Err(error) if error.is_data() => {
                return self.reject_line("unknown message type, or a missing or invalid key");
            }
            Err(error) => return self.reject_line(&format!("not JSON, column {}", error.column())),
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
        let line_count = self.line_count;
        match self.report.ignored_count {
            ..=PROGRAM_IGNORED_NOTES_MAX => {
                self.context.log().write_note(&format!("descriptor 3, line {line_count}: ignored: {wrong}"));
            }
            count if count == PROGRAM_IGNORED_NOTES_MAX + 1 => {
                self.context.log().write_note("descriptor 3: more lines are ignored");
            }
            _ => {}
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
            ProgramMessage::Artifact { name, path, content_type, expires, optional } => {
                (name, ArtifactKind::File { path, content_type }, expires, optional)
            }
            ProgramMessage::Directory { name, path, expires, optional } => {
                (name, ArtifactKind::Directory { path }, expires, optional)
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
        declare_artifact(ArtifactDeclaration { name, kind, expires, optionality }, context)
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

/// Reads one byte more than a reply may have, so that it is rejected by its size.
fn read_reply_file(path: &Path, max_bytes: usize, context: &Context) -> Result<Vec<u8>, String> {
    let opened = safe_open::open_root(context.workdir()).and_then(|root| safe_open::open(root.as_fd(), path));
    let file = File::from(opened.map_err(|error| safe_open::classify_error(&error).1)?);
    let mut body = Vec::new();
    file.take(max_bytes as u64 + 1).read_to_end(&mut body).map_err(|error| error.to_string())?;
    Ok(body)
}

fn declare_artifact(mut declaration: ArtifactDeclaration, context: &Context) -> Result<(), String> {
    let definition = context.task().definition.json();
    if declaration.expires.as_ref().is_some_and(|expires| expires_after_task(expires, definition)) {
        context.log().write_note(&format!("artifact {}: expires with the task, not later", declaration.name));
        declaration.expires = None;
    }
    context.artifacts().declare(declaration).map_err(|error| error.to_string())
}
