//! Tasks as requests: each task becomes a request to an AMQP worker group, and the answer becomes its outcome.
//!
//! The message is named after the task, so that a worker which is asked again knows it. Answers come to the connection that
//! asked; when that is lost the request is sent once more.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use super::tasks::RESULT;
use super::{Form, Waits, request};
use crate::client::{Answer, Call, CallError, Client, Part};
use crate::domain::backoff::Policy;
use crate::handler::artifact::{Declaration, What};
use crate::handler::{Context, NotCompleted, NotPrepared, PayloadHandler};
use crate::limits::{BRIDGE_PARTS_MAX, BRIDGE_RETRY_MAX, BRIDGE_RETRY_MIN};

/// The content of an answer that is no JSON.
const RAW: &str = "public/result";
const RETRY: Policy = Policy { first: BRIDGE_RETRY_MIN, max: BRIDGE_RETRY_MAX };

/// Where tasks go.
#[derive(Debug)]
pub struct Settings {
    /// Who asks.
    pub client: Client,
    /// Where requests are published; empty for a queue itself.
    pub exchange: String,
    /// Under which key.
    pub key: String,
    /// Where tasks come from, as a part of the name of each message.
    pub origin: String,
    /// What the payload of a task is.
    pub form: Form,
    /// How long an answer may take, all attempts together.
    pub max_run_time: Duration,
}

/// Turns tasks into requests.
#[derive(Debug)]
pub struct Requests(Settings);

impl Requests {
    /// Nothing is sent yet.
    #[must_use]
    pub const fn new(settings: Settings) -> Self {
        Self(settings)
    }
}

impl PayloadHandler for Requests {
    type Payload = Value;
    type Prepared = Call;

    fn describe(&self) -> String {
        let Settings { exchange, key, .. } = &self.0;
        if exchange.is_empty() {
            format!("hands tasks on to the queue {key} as requests")
        } else {
            format!("hands tasks on to {exchange} under {key} as requests")
        }
    }

    async fn prepare(&self, payload: Value, context: &Context) -> Result<Call, NotPrepared> {
        let request = request(payload, self.0.form).map_err(|what| NotPrepared::Malformed(vec![what]))?;
        let mut call = Call {
            exchange: self.0.exchange.clone(),
            key: self.0.key.clone(),
            timeout: self.0.max_run_time,
            message_id: Some(format!("{}/{}", self.0.origin, context.task().run.task)),
            ..super::call(request)
        };
        if let Some(trace) = context.task().env.get("TRACEPARENT") {
            call.headers.insert("traceparent".to_owned(), trace.clone());
        }
        call.check().map_err(|error| NotPrepared::Malformed(vec![format!("payload: {error}")]))?;
        Ok(call)
    }

    async fn execute(&self, call: Call, context: &Context) -> Result<(), NotCompleted> {
        tokio::select! {
            ended = self.ask(call, context) => ended,
            _ = context.canceled() => {
                Err(NotCompleted::Intermittent("the request may go on without this bridge".to_owned()))
            }
        }
    }
}

impl Requests {
    async fn ask(&self, mut call: Call, context: &Context) -> Result<(), NotCompleted> {
        let until = Instant::now() + self.0.max_run_time;
        let mut waits = Waits::new(RETRY);
        let mut kept = Kept::default();
        loop {
            call.timeout = until.saturating_duration_since(Instant::now());
            context.set_progress("waits for the answer");
            match self.once(&call, &mut kept, context).await? {
                Ok(answer) => return keep_last(&answer, context).await,
                Err(CallError::TimedOut(_)) => {
                    return Err(NotCompleted::Failed(format!("no answer within {:?}", self.0.max_run_time)));
                }
                Err(error @ (CallError::TooLarge { .. } | CallError::TooLong(_))) => {
                    return Err(NotCompleted::Failed(error.to_string()));
                }
                Err(error) => {
                    context.log().note(&format!("the request is sent once more in a while: {error}"));
                    context.set_progress(&format!("waits: {error}"));
                    tokio::select! {
                        () = waits.next(None) => {}
                        // The next one says that the time is over.
                        () = tokio::time::sleep_until(until) => {}
                    }
                }
            }
        }
    }

    async fn once(
        &self,
        call: &Call,
        kept: &mut Kept,
        context: &Context,
    ) -> Result<Result<Answer, CallError>, NotCompleted> {
        let mut answers = match self.0.client.stream(call).await {
            Ok(answers) => answers,
            Err(error) => return Ok(Err(error)),
        };
        kept.again();
        loop {
            match answers.next().await {
                Some(Ok(answer)) if answer.part == Part::Last => return Ok(Ok(answer)),
                Some(Ok(part)) => kept.part(&part, context).await?,
                Some(Err(error)) => return Ok(Err(error)),
                None => return Ok(Err(CallError::Lost)),
            }
        }
    }
}

/// The partial answers that were kept, over all attempts: what came again is not kept twice.
#[derive(Debug, Default)]
struct Kept {
    kept: usize,
    seen: usize,
}

impl Kept {
    fn again(&mut self) {
        self.seen = 0;
    }

    async fn part(&mut self, part: &Answer, context: &Context) -> Result<(), NotCompleted> {
        self.seen += 1;
        if self.seen <= self.kept {
            return Ok(());
        }
        self.kept = self.seen;
        if self.kept > BRIDGE_PARTS_MAX {
            if self.kept == BRIDGE_PARTS_MAX + 1 {
                context.log().note(&format!("only the first {BRIDGE_PARTS_MAX} partial answers are kept"));
            }
            return Ok(());
        }
        let name = format!("public/parts/{:04}{}", self.kept, if is_json(&part.body) { ".json" } else { "" });
        store(&name, &format!("part-{}", self.kept), &part.body, context).await
    }
}

async fn keep_last(answer: &Answer, context: &Context) -> Result<(), NotCompleted> {
    let name = if is_json(&answer.body) { RESULT } else { RAW };
    if !answer.body.is_empty() {
        store(name, "answer", &answer.body, context).await?;
    }
    if answer.is_ok() {
        return Ok(());
    }
    let status = answer.status.as_deref().unwrap_or("no status");
    let why = answer.reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"));
    Err(NotCompleted::Failed(format!("it was answered with {status}{why}; the answer is the artifact {name}")))
}

async fn store(name: &str, file: &str, bytes: &[u8], context: &Context) -> Result<(), NotCompleted> {
    let path = context.workdir().join(file);
    let host = |error: std::io::Error| NotCompleted::Host(format!("an answer cannot be stored: {error}"));
    tokio::fs::write(&path, bytes).await.map_err(host)?;
    let kind = if is_json(bytes) { "application/json" } else { "application/octet-stream" };
    let what = What::File { path: file.into(), content_type: Some(kind.to_owned()) };
    let declared = context.artifacts().declare(Declaration::new(name, what));
    declared.map_err(|error| NotCompleted::Internal(error.to_string()))
}

fn is_json(bytes: &[u8]) -> bool {
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes).is_ok()
}
