//! One job's view of the store: the tables, the index, and the moves of the job.
//!
//! A job runs in a savepoint. Its moves are applied to the index once all its statements have succeeded.

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::super::Config;
use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::super::task_definition::{MESSAGE_TTL_MAX, NewTask, Requires, is_same_json};
use super::super::task_state::{
    ClaimMethod, Priority, RunError, RunRecord, RunState, TaskRecord, Transition, WorkerIdentity,
};
use super::StoreError;
use super::index::{Index, Move, Position};
use crate::limits::{QUEUE_CLAIM_SCAN_MAX, QUEUE_REPLY_BYTES_MAX, QUEUE_SWEEP_MAX};

/// A task with its row id and its position in the index when it was read.
#[derive(Debug)]
pub(crate) struct TaskRow {
    pub(crate) id: i64,
    pub(crate) task: TaskRecord,
    position: Position,
}

#[derive(Debug)]
pub(crate) struct ClaimedRun {
    pub(crate) task: TaskRecord,
    pub(crate) run: u32,
    pub(crate) taken_until: UnixMillis,
    /// `None` in the response to a reclaim.
    pub(crate) definition: Option<String>,
    pub(crate) scopes: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct ListedTask {
    pub(crate) task: TaskRecord,
    pub(crate) definition: String,
}

#[derive(Debug)]
pub(crate) struct ListPage<T> {
    pub(crate) items: Vec<T>,
    /// Start of the next page, if there is one.
    pub(crate) next: Option<String>,
}

pub(crate) struct Tx<'a> {
    pub(super) conn: &'a Connection,
    pub(super) index: &'a mut Index,
    pub(crate) config: &'a Config,
    pub(crate) now: UnixMillis,
    pub(super) moves: Vec<Move>,
    /// Task queues in which a run became pending.
    pub(super) queues_with_work: Vec<String>,
    /// Artifact files to remove after the commit.
    pub(super) files_to_remove: Vec<String>,
}

type StoreResult<T> = Result<T, StoreError>;

impl Tx<'_> {
    pub(crate) fn find_task(&self, task_id: &str) -> StoreResult<Option<TaskRow>> {
        let mut found = self.conn.prepare_cached(&select_tasks("WHERE task_id = ?1"))?;
        Ok(found.query_row([task_id], read_task).optional()?)
    }

    pub(crate) fn require_task(&self, task_id: &str) -> StoreResult<TaskRow> {
        self.find_task(task_id)?.ok_or_else(|| QueueError::task_not_found(task_id).into())
    }

    fn task_by_id(&self, id: i64) -> StoreResult<Option<TaskRow>> {
        let mut found = self.conn.prepare_cached(&select_tasks("WHERE id = ?1"))?;
        Ok(found.query_row([id], read_task).optional()?)
    }

    /// Writes a task back, updates the index and schedules its dependents.
    pub(crate) fn save(&mut self, row: TaskRow) -> StoreResult<TaskRecord> {
        let TaskRow { id, task, position: from } = row;
        self.conn
            .prepare_cached("UPDATE tasks SET retries_left = ?2, runs = ?3, open = ?4 WHERE id = ?1")?
            .execute(params![id, task.retries_left, runs_json(&task)?, task.is_open()])?;
        self.record_move(id, &task, from)?;
        if !task.is_open() {
            self.schedule_dependents(&task)?;
        }
        Ok(task)
    }

    fn record_move(&mut self, id: i64, task: &TaskRecord, from: Position) -> StoreResult<()> {
        let to = Position::of(id, task);
        if let (Some(queue), Some((run, record))) = (to.pending_queue(), task.pending_run())
            && to.pending_queue() != from.pending_queue()
        {
            self.queues_with_work.push(queue.to_owned());
            self.put_message(task, run, record.scheduled)?;
        }
        self.moves.push(Move { from, to });
        Ok(())
    }

    /// Creating a task with the same definition again returns the existing task.
    pub(crate) fn create_task(&mut self, new_task: NewTask) -> StoreResult<TaskRecord> {
        if let Some(row) = self.find_task(&new_task.task.task_id)? {
            if !is_same_json(&new_task.json, &self.definition(row.id)?) {
                return Err(QueueError::conflict(format!(
                    "taskId `{}` is already used by another task",
                    new_task.task.task_id
                ))
                .into());
            }
            return Ok(row.task);
        }
        let mut task = new_task.task;
        let waits = self.has_unmet_dependencies(&new_task.dependencies, new_task.requires, &task.task_id)?;
        if !waits {
            task.schedule(self.now);
        }
        self.conn
            .prepare_cached(
                "INSERT INTO tasks (task_id, queue, scheduler, project, task_group, priority, deadline, expires, \
                 retries, retries_left, runs, open) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )?
            .execute(params![
                task.task_id,
                task.queue,
                task.scheduler,
                task.project,
                task.group,
                task.priority.rank(),
                task.deadline.0,
                task.expires.0,
                task.retries,
                task.retries_left,
                runs_json(&task)?,
                true,
            ])?;
        let id = self.conn.last_insert_rowid();
        let scopes = serde_json::to_string(&new_task.scopes).map_err(StoreError::json)?;
        self.conn
            .prepare_cached("INSERT INTO definitions (id, scopes, json) VALUES (?1, ?2, ?3)")?
            .execute(params![id, scopes, new_task.json])?;
        if waits {
            for needs in &new_task.dependencies {
                self.conn
                    .prepare_cached("INSERT OR IGNORE INTO dependencies (needs, id) VALUES (?1, ?2)")?
                    .execute(params![needs, id])?;
            }
        }
        self.record_move(id, &task, Position::default())?;
        Ok(task)
    }

    /// Fails if a dependency does not exist.
    fn has_unmet_dependencies(&self, needed: &[String], requires: Requires, own: &str) -> StoreResult<bool> {
        let mut waits = false;
        for needs in needed {
            if needs == own {
                waits = true;
                continue;
            }
            let Some(row) = self.find_task(needs)? else {
                return Err(
                    QueueError::input(format!("`task.dependencies` references non-existing tasks: {needs}")).into()
                );
            };
            waits |= !is_met(&row.task, requires);
        }
        Ok(waits)
    }

    fn schedule_dependents(&mut self, task: &TaskRecord) -> StoreResult<()> {
        let waiting: Vec<i64> = self
            .conn
            .prepare_cached("SELECT id FROM dependencies WHERE needs = ?1")?
            .query_map([&task.task_id], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in waiting {
            let Some(mut row) = self.task_by_id(id)?.filter(|row| row.task.runs.is_empty()) else {
                continue;
            };
            let DependencyFields { dependencies, requires } =
                serde_json::from_str(&self.definition(id)?).map_err(StoreError::json)?;
            if !self.has_unmet_dependencies(&dependencies, requires, &row.task.task_id)? {
                self.conn.prepare_cached("DELETE FROM dependencies WHERE id = ?1")?.execute([id])?;
                row.task.schedule(self.now);
                self.save(row)?;
            }
        }
        Ok(())
    }

    pub(crate) fn definition(&self, id: i64) -> StoreResult<String> {
        let mut found = self.conn.prepare_cached("SELECT json FROM definitions WHERE id = ?1")?;
        Ok(found.query_row([id], |row| row.get(0))?)
    }

    pub(crate) fn scopes(&self, id: i64) -> StoreResult<Vec<String>> {
        let mut found = self.conn.prepare_cached("SELECT scopes FROM definitions WHERE id = ?1")?;
        let text: String = found.query_row([id], |row| row.get(0))?;
        serde_json::from_str(&text).map_err(StoreError::json)
    }

    pub(crate) fn claim(
        &mut self,
        mut row: TaskRow,
        run: u32,
        worker: &WorkerIdentity,
    ) -> StoreResult<Result<ClaimedRun, RunError>> {
        let (now, length) = (self.now, self.config.claim_timeout);
        match row.task.claim(run, worker, ClaimMethod::ClaimTask, now, length) {
            Err(error) => Ok(Err(error)),
            Ok(transition) => {
                let definition = self.definition(row.id)?;
                self.finish_claim(row, run, transition, Some(definition)).map(Ok)
            }
        }
    }

    /// Saves a task whose claim on `run` was extended.
    pub(crate) fn reclaim(&mut self, row: TaskRow, run: u32) -> StoreResult<ClaimedRun> {
        self.finish_claim(row, run, Transition::Changed, None)
    }

    fn finish_claim(
        &mut self,
        row: TaskRow,
        run: u32,
        transition: Transition,
        definition: Option<String>,
    ) -> StoreResult<ClaimedRun> {
        let scopes = self.scopes(row.id)?;
        let task = match transition {
            Transition::Unchanged => row.task,
            Transition::Changed => self.save(row)?,
        };
        let record = task.runs.get(run as usize);
        let taken_until = record.and_then(|record| record.taken_until).unwrap_or_default();
        Ok(ClaimedRun { run, taken_until, definition, scopes, task })
    }

    /// `claimWork`: claims the most urgent and then the oldest pending runs.
    pub(crate) fn claim_work(
        &mut self,
        queue: &str,
        worker: &WorkerIdentity,
        limit: usize,
    ) -> StoreResult<Vec<ClaimedRun>> {
        let next: Vec<i64> =
            self.index.pending(queue).take(limit + QUEUE_CLAIM_SCAN_MAX).map(|entry| entry.id).collect();
        let (now, length) = (self.now, self.config.claim_timeout);
        let messages = self.has_messages(queue)?;
        let (mut claimed, mut bytes) = (Vec::new(), 0_usize);
        for id in next {
            if claimed.len() >= limit {
                break;
            }
            let Some(mut row) = self.task_by_id(id)? else { continue };
            let Some((run, _)) = row.task.pending_run() else { continue };
            // Past its deadline but not resolved yet.
            let Ok(transition) = row.task.claim(run, worker, ClaimMethod::ClaimWork, now, length) else {
                continue;
            };
            let definition = self.definition(id)?;
            bytes = bytes.saturating_add(definition.len());
            if bytes > QUEUE_REPLY_BYTES_MAX && !claimed.is_empty() {
                // The worker limits the size of a response; the next call gets the rest.
                break;
            }
            let claim = self.finish_claim(row, run, transition, Some(definition))?;
            if messages {
                self.drop_message(&claim.task.task_id, claim.run)?;
            }
            claimed.push(claim);
        }
        Ok(claimed)
    }

    pub(super) fn expire_due(&mut self) -> StoreResult<()> {
        let (claims, deadlines) = (self.claims_due(), self.deadlines_due());
        for id in deadlines {
            if let Some(mut row) = self.task_by_id(id)?
                && row.task.expire_deadline(self.now) == Transition::Changed
            {
                self.save(row)?;
            }
        }
        for id in claims {
            if let Some(mut row) = self.task_by_id(id)?
                && row.task.expire_claim(self.now) == Transition::Changed
            {
                self.save(row)?;
            }
        }
        Ok(())
    }

    fn claims_due(&self) -> Vec<i64> {
        self.index.claims_due(self.now.minus(self.config.claim_delay), QUEUE_SWEEP_MAX)
    }

    fn deadlines_due(&self) -> Vec<i64> {
        self.index.deadlines_due(self.now.minus(self.config.deadline_delay), QUEUE_SWEEP_MAX)
    }

    pub(crate) fn count_pending(&self, queue: &str) -> usize {
        self.index.pending_count(queue)
    }

    /// Next to be claimed first.
    pub(crate) fn list_pending(&self, queue: &str, after: usize, limit: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self.index.pending(queue).skip(after).take(limit + 1).map(|entry| entry.id).collect();
        self.page(&ids, limit, |seen, _| (after + seen).to_string())
    }

    /// Oldest first, starting after row `after`.
    pub(crate) fn list_claimed(&self, queue: &str, after: i64, limit: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self.index.claimed(queue, after).take(limit + 1).collect();
        self.page(&ids, limit, |_, last| last.to_string())
    }

    /// Newest first, starting below row `before`.
    pub(crate) fn list_all(&self, before: i64, limit: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self
            .conn
            .prepare_cached("SELECT id FROM tasks WHERE id < ?1 ORDER BY id DESC LIMIT ?2")?
            .query_map(params![before, i64::try_from(limit + 1).unwrap_or(i64::MAX)], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        self.page(&ids, limit, |_, last| last.to_string())
    }

    /// At most `limit` tasks and `QUEUE_REPLY_BYTES_MAX` bytes, but at least one task. The token is made of the number
    /// of tasks on the page and the last of them.
    fn page(
        &self,
        ids: &[i64],
        limit: usize,
        token: impl Fn(usize, i64) -> String,
    ) -> StoreResult<ListPage<ListedTask>> {
        let (mut items, mut bytes, mut last) = (Vec::new(), 0_usize, None);
        for id in ids {
            let Some(row) = self.task_by_id(*id)? else { continue };
            let definition = self.definition(*id)?;
            bytes = bytes.saturating_add(definition.len());
            if let Some(last) = last
                && (items.len() == limit || bytes > QUEUE_REPLY_BYTES_MAX)
            {
                return Ok(ListPage { next: Some(token(items.len(), last)), items });
            }
            items.push(ListedTask { definition, task: row.task });
            last = Some(*id);
        }
        Ok(ListPage { items, next: None })
    }

    pub(super) fn remove_expired(&mut self) -> StoreResult<()> {
        let gone: Vec<(i64, String)> = self
            .conn
            .prepare_cached("SELECT id, task_id FROM tasks WHERE expires <= ?1 LIMIT ?2")?
            .query_map(params![self.now.0, sweep_max()], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        for (id, task_id) in gone {
            if let Some(row) = self.task_by_id(id)? {
                self.moves.push(Move { from: row.position, to: Position::default() });
            }
            for table in ["tasks", "definitions", "dependencies"] {
                self.conn.prepare_cached(&format!("DELETE FROM {table} WHERE id = ?1"))?.execute([id])?;
            }
            for table in ["messages", "artifacts"] {
                self.conn.prepare_cached(&format!("DELETE FROM {table} WHERE task_id = ?1"))?.execute([&task_id])?;
            }
            self.files_to_remove.push(task_id);
        }
        self.remove_expired_artifacts()?;
        self.conn
            .prepare_cached("DELETE FROM messages WHERE id IN (SELECT id FROM messages WHERE expires <= ?1 LIMIT ?2)")?
            .execute(params![self.now.0, sweep_max()])?;
        Ok(())
    }

    pub(super) fn message_expiry(&self, task: &TaskRecord) -> UnixMillis {
        task.deadline.min(self.now.plus(MESSAGE_TTL_MAX))
    }
}

pub(super) fn sweep_max() -> i64 {
    i64::try_from(QUEUE_SWEEP_MAX).unwrap_or(i64::MAX)
}

#[derive(serde::Deserialize)]
struct DependencyFields {
    dependencies: Vec<String>,
    requires: Requires,
}

fn is_met(task: &TaskRecord, requires: Requires) -> bool {
    task.last_run().is_some_and(|(_, run)| match run.state {
        RunState::Completed => true,
        RunState::Failed | RunState::Exception => requires == Requires::AllResolved,
        RunState::Pending | RunState::Running => false,
    })
}

fn runs_json(task: &TaskRecord) -> StoreResult<String> {
    serde_json::to_string(&task.runs).map_err(StoreError::json)
}

pub(super) fn select_tasks(condition: &str) -> String {
    format!(
        "SELECT id, task_id, queue, scheduler, project, task_group, priority, deadline, expires, retries, \
         retries_left, runs FROM tasks {condition}"
    )
}

pub(super) fn read_task(row: &Row<'_>) -> rusqlite::Result<TaskRow> {
    let id = row.get(0)?;
    let runs = row.get_ref(11)?.as_str()?;
    let runs: Vec<RunRecord> = serde_json::from_str(runs)
        .map_err(|error| rusqlite::Error::FromSqlConversionFailure(11, rusqlite::types::Type::Text, Box::new(error)))?;
    let task = TaskRecord {
        task_id: row.get(1)?,
        queue: row.get(2)?,
        scheduler: row.get(3)?,
        project: row.get(4)?,
        group: row.get(5)?,
        priority: Priority::from_rank(row.get(6)?).unwrap_or(Priority::Lowest),
        deadline: UnixMillis(row.get(7)?),
        expires: UnixMillis(row.get(8)?),
        retries: row.get(9)?,
        retries_left: row.get(10)?,
        runs,
    };
    let from = Position::of(id, &task);
    Ok(TaskRow { id, task, position: from })
}

impl TaskRow {
    pub(super) fn position(self) -> Position {
        self.position
    }
}
