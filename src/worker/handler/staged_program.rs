//! Programs that launch work elsewhere, by the phases `start`, `verify` and `cancel` of the protocol `stdio-json/1`.
//!
//! The document names the work under `work`: its `key`, `launch`, which counts the launches, and the `handle` and `phase` that the program
//! said last. The program says `{"type": "work", "handle": "…", "phase": "…"}` on descriptor 3 as long as the work goes on, and nothing
//! once it is done. Its exit status says the rest:
//!
//! | status | `start` | `verify` |
//! | --- | --- | --- |
//! | 0 | started, or done without a `work` message | goes on, or done without a `work` message |
//! | `JOURNEYMAN_EXIT_RETRY` | not started: start it later | no answer: look again later |
//! | `JOURNEYMAN_EXIT_UNAVAILABLE` | not started, no room: start it later | it is gone: launch it again |
//! | `JOURNEYMAN_EXIT_INTERNAL`, a signal, a timeout | no answer: start it again | no answer: look again later |
//! | any other | the task has failed | the task has failed |
//!
//! `start` is called again if its answer was lost, so it has to find work of the same key and launch that runs already. If it sent a
//! `work` message before, it is told the handle of that. One that sent a message and failed is followed by `cancel`.
//! `cancel` ends the work, if it runs, and removes it; status 0 says that it is gone. It is called after the end too, unless the source
//! schedules messages.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use super::Context;
use super::process::{EndCause, ProcessStatus, RunLimits};
use super::program::{Program, status};
use super::program_messages::{ProgramRun, WorkMessage};
use super::staged::{FailureClass, PhaseLimit, Progress, StagedAnswer, StagedHandler, StagedPolicy, Stamp, Work};
use crate::handler::config::StagedProgram;
use journeyman_domain::limits::STAGED_CALL_TIMEOUT;

/// Between two starts, unless the program says otherwise.
const START_RETRY: Duration = Duration::from_secs(30);

/// The program, without its schema: its payloads are validated already.
pub(super) struct ProgramWork {
    pub(super) program: Program,
    pub(super) keys: StagedProgram,
}

impl ProgramWork {
    /// Returns the exit status, `None` if it says nothing of the work, and what the program said last.
    async fn call(&self, phase: &str, work: &Work<'_, Value>, context: &Context) -> (Option<i32>, Option<WorkMessage>) {
        let limits = RunLimits {
            run_time: Some(STAGED_CALL_TIMEOUT - Duration::from_secs(5)),
            termination_grace: Duration::from_secs(2),
        };
        let run = self.program.run_work_phase(phase, work, limits, context).await;
        match run {
            Ok(ProgramRun { end, report }) => match (end.cause, end.status) {
                (EndCause::Exited, ProcessStatus::Code(code)) if code != status::INTERNAL => (Some(code), report.work),
                _ => {
                    context.log().write_note(&format!("{phase}: {}", end.describe()));
                    (None, report.work)
                }
            },
            Err(error) => {
                context.log().write_note(&format!("{phase}: cannot run the program: {error}"));
                (None, None)
            }
        }
    }

    fn failed(phase: &str, code: i32) -> StagedAnswer {
        StagedAnswer::Failed { class: FailureClass::Task, reason: format!("{phase}: exit status {code}").into() }
    }

    fn progress(message: &WorkMessage) -> Progress {
        let now = Timestamp::now();
        let stamp = |at: Timestamp| Stamp(at.as_millisecond());
        Progress {
            phase: message.phase.as_str().into(),
            since: message.since.map(stamp),
            observed_at: stamp(message.now.unwrap_or(now)),
            check_in: message.check_in.map(Duration::from_secs_f64),
        }
    }
}

impl StagedHandler for ProgramWork {
    type Payload = Value;

    fn policy(&self, _payload: &Value) -> StagedPolicy {
        let StagedProgram { check_interval, phases, retries } = &self.keys;
        let limit = |(phase, lasts_max): (&String, &journeyman_platform::settings::values::Span)| {
            (phase.as_str().into(), PhaseLimit { lasts_max: lasts_max.0, class: FailureClass::Task })
        };
        StagedPolicy {
            phases: phases.iter().map(limit).collect::<BTreeMap<_, _>>(),
            infrastructure_retries: *retries,
            capacity_retries: u32::MAX,
            check_interval: check_interval.0,
        }
    }

    /// `start` looks itself.
    async fn adopt(&self, _work: Work<'_, Value>) -> StagedAnswer {
        StagedAnswer::Absent
    }

    async fn start(&self, work: Work<'_, Value>) -> StagedAnswer {
        // A start that is killed halfway says nothing; what it started is canceled afterwards.
        let context = work.context.without_cancellation();
        let (code, message) = self.call("start", &work, &context).await;
        let handle = message.as_ref().and_then(|message| message.handle.as_deref());
        let answer = match (code, &message) {
            (None, _) => StagedAnswer::Unknown,
            (Some(0), Some(message)) => {
                let (handle, progress) = (handle.unwrap_or_default().into(), Self::progress(message));
                return StagedAnswer::Started { handle, progress };
            }
            (Some(0), None) => StagedAnswer::Done,
            (Some(code @ (status::RETRY | status::UNAVAILABLE)), message) => {
                let check_in = message.as_ref().and_then(|message| message.check_in);
                let after = check_in.map_or(START_RETRY, Duration::from_secs_f64);
                let reason = format!("start: exit status {code}").into();
                StagedAnswer::Retry { after, class: FailureClass::Capacity, reason }
            }
            (Some(code), _) => Self::failed("start", code),
        };
        match handle {
            Some(handle) => StagedAnswer::Announced { handle: handle.into(), answer: Box::new(answer) },
            None => answer,
        }
    }

    async fn verify(&self, work: Work<'_, Value>) -> StagedAnswer {
        match self.call("verify", &work, work.context).await {
            (None | Some(status::RETRY), _) => StagedAnswer::Unknown,
            (Some(0), Some(message)) => StagedAnswer::Progress(Self::progress(&message)),
            (Some(0), None) => StagedAnswer::Done,
            (Some(status::UNAVAILABLE), _) => StagedAnswer::Lost { reason: "the program says that it is gone".into() },
            (Some(code), _) => Self::failed("verify", code),
        }
    }

    async fn cancel(&self, work: Work<'_, Value>) -> StagedAnswer {
        let context = work.context.without_cancellation();
        match self.call("cancel", &work, &context).await {
            (Some(0), None) => StagedAnswer::Canceled,
            (Some(0), Some(message)) => StagedAnswer::Progress(Self::progress(&message)),
            (Some(_) | None, _) => StagedAnswer::Unknown,
        }
    }
}
