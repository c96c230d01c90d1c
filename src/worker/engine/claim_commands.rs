//! Commands and queries about one claim.

use crate::handler::log::TaskLog;
use journeyman_domain::claim::{CancelCommand, CancelResult, ClaimEvent};
use journeyman_domain::id::LocalToken;
use journeyman_domain::worker::Event;
use journeyman_platform::host::containment::ProcessScope;

use super::claim_runtime::ClaimCommand;
use super::event_loop::Engine;
use super::snapshot::phase_statuses;
use super::status::{ClaimCommandStatus, ClaimDetail, Note};
use super::task_lookup::{self, TaskLookupError};
use super::task_view::TaskView;
use super::timeline::seconds_between;

/// A claim, with the scope of its processes.
#[derive(Debug)]
pub struct ClaimSnapshot {
    /// All but its processes.
    pub detail: ClaimDetail,
    /// The scope of its processes; listing them blocks.
    pub enclosure: Option<ProcessScope>,
}

/// The result of a command about a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandResult {
    /// The run, as `TASK/RUN`.
    pub run: String,
    /// What follows from the command.
    pub result: CancelResult,
}

impl Engine {
    fn resolve_claim(&self, name: &str) -> Result<LocalToken, TaskLookupError> {
        let held: Vec<_> = self.rules.claims().map(|claim| (claim.claim, claim.run)).collect();
        task_lookup::resolve(name, &held)
    }

    pub(super) fn task_log(&self, name: &str) -> Result<TaskLog, TaskLookupError> {
        let claim = self.resolve_claim(name)?;
        // A claim that is being requested has no log yet.
        let task = self.calls.claims[&claim].task.as_ref();
        task.map(TaskView::followed_log)
            .ok_or_else(|| TaskLookupError::NotFound { name: name.to_owned(), held: Vec::new() })
    }

    pub(super) fn claim_snapshot(&self, name: &str) -> Result<ClaimSnapshot, TaskLookupError> {
        let claim = self.resolve_claim(name)?;
        let (view, live) = (self.rules.claim(claim), &self.calls.claims[&claim]);
        let now = self.now();
        let binding = &self.sources[live.source.index()];
        let task = live.task.as_ref();
        let definition = task.map(|task| task.task().definition.json());
        let text = |path: &str| definition.and_then(|task| task.pointer(path)?.as_str()).map(str::to_owned);
        let scope = task.map(|task| task.scope().clone());
        let detail = ClaimDetail {
            claim: self.claim_status(&view, now),
            group: text("/taskGroupId"),
            source_description: binding.source.describe(),
            handler: binding.handler.describe(),
            dequeue_count: live.dequeue_count,
            reclaims: live.reclaims,
            reclaim_in_seconds: view.state.reclaim_due().map(|at| seconds_between(now, at)),
            containment: self.containment.level().as_str().to_owned(),
            cgroup: scope.as_ref().and_then(|scope| scope.cgroup().map(Into::into)),
            processes: Vec::new(),
            memory_peak_bytes: None,
            cpu_seconds: None,
            work_dir: task.and_then(|task| Some(task.workdir()?.to_owned())),
            phases: phase_statuses(&live.timeline, now),
            last_command: live.last_command.as_ref().map(|last| ClaimCommandStatus {
                command: last.command.as_str().to_owned(),
                note: last.note.clone(),
                seconds_ago: seconds_between(last.at, now),
            }),
        };
        Ok(ClaimSnapshot { detail, enclosure: scope })
    }

    /// Affects this claim only (I34).
    pub(super) fn command_claim(
        &mut self,
        name: &str,
        command: CancelCommand,
        note: Note,
    ) -> Result<CommandResult, TaskLookupError> {
        let claim = self.resolve_claim(name)?;
        let view = self.rules.claim(claim);
        let (run, result) = (view.run.to_string(), view.state.preview_cancel(command));
        tracing::info!(
            claim.run = run,
            command = command.as_str(),
            by = note.by,
            note = note.text,
            ?result,
            "command about a claim"
        );
        if !matches!(result, CancelResult::AlreadyReported(_) | CancelResult::Lost(_)) {
            let last_command = ClaimCommand { command, note, at: self.now() };
            let live = self.calls.claim(claim);
            if let Some(task) = &live.task {
                task.write_note(&last_command.log_line());
            }
            live.last_command = Some(last_command);
        }
        self.handle_event(Event::Claim(claim, ClaimEvent::Command(command)));
        Ok(CommandResult { run, result })
    }
}
