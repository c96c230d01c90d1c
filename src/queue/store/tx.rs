//! What a job sees of the store: the tables, the index, and the moves it has made so far.
//!
//! A job runs alone, inside a savepoint. Its moves reach the index once all its statements have succeeded.

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::super::task_definition::{MESSAGE_TTL_MAX, NewTask, is_same_json};
use super::super::task_state::{
    ClaimMethod, Priority, RunError, RunRecord, RunState, TaskRecord, Transition, WorkerIdentity,
};
use super::index::{Index, Move, Position};
use super::recent_workers::RecentWorkers;
use super::{StoreConfig, StoreError};
use crate::limits::{QUEUE_CLAIM_SCAN_MAX, QUEUE_REPLY_BYTES_MAX, QUEUE_SWEEP_MAX};

/// A task with its row's number, and where it stood when it was read.
#[derive(Debug)]
pub(crate) struct TaskRow {
    pub(crate) id: i64,
    pub(crate) task: TaskRecord,
    position: Position,
}

/// A run that a worker has just been given.
#[derive(Debug)]
pub(crate) struct ClaimedRun {
    pub(crate) task: TaskRecord,
    pub(crate) run: u32,
    pub(crate) taken_until: UnixMillis,
    pub(crate) definition: String,
    pub(crate) scopes: Vec<String>,
}

/// An entry of a listing of tasks.
#[derive(Debug)]
pub(crate) struct ListedTask {
    pub(crate) task: TaskRecord,
    pub(crate) definition: String,
}

/// A page of a listing.
#[derive(Debug)]
pub(crate) struct ListPage<T> {
    pub(crate) items: Vec<T>,
    /// Where the next page starts; `None` where there is none.
    pub(crate) next: Option<String>,
}

/// As many of a listing's tasks as fit into an answer.
struct PartialPage {
    items: Vec<ListedTask>,
    /// How many of the rows have been looked at, and the last of them.
    seen: usize,
    last: Option<i64>,
}

/// The store, as one job sees it.
pub(crate) struct Tx<'a> {
    pub(super) conn: &'a Connection,
    pub(super) index: &'a mut Index,
    pub(crate) workers: &'a mut RecentWorkers,
    pub(crate) config: &'a StoreConfig,
    pub(crate) now: UnixMillis,
    pub(super) moves: Vec<Move>,
    /// Queues in which something has become pending.
    pub(super) queues_with_work: Vec<String>,
    /// Files that nothing refers to any more once this is committed.
    pub(super) files_to_remove: Vec<String>,
}

type StoreResult<T> = Result<T, StoreError>;

/// What of its dependencies a task waits for. The rest of its definition is not read.
#[derive(serde::Deserialize)]
struct RequiresField<'a> {
    #[serde(borrow)]
    requires: Option<&'a str>,
}

impl Tx<'_> {
    /// A task by its name.
    pub(crate) fn find_task(&self, task_id: &str) -> StoreResult<Option<TaskRow>> {
        let mut found = self.conn.prepare_cached(&select_tasks("WHERE task_id = ?1"))?;
        Ok(found.query_row([task_id], read_task).optional()?)
    }

    /// A task by its name, or the usual refusal.
    pub(crate) fn require_task(&self, task_id: &str) -> StoreResult<TaskRow> {
        self.find_task(task_id)?.ok_or_else(|| QueueError::task_not_found(task_id).into())
    }

    fn task_by_id(&self, id: i64) -> StoreResult<Option<TaskRow>> {
        let mut found = self.conn.prepare_cached(&select_tasks("WHERE id = ?1"))?;
        Ok(found.query_row([id], read_task).optional()?)
    }

    /// Writes a changed task back, and does what follows from the change.
    pub(crate) fn save(&mut self, kept: TaskRow) -> StoreResult<TaskRecord> {
        let TaskRow { id, task, position: from } = kept;
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

    /// Stores a new task. The same definition again finds the task as it is.
    pub(crate) fn create_task(&mut self, made: NewTask) -> StoreResult<TaskRecord> {
        if let Some(kept) = self.find_task(&made.task.task_id)? {
            if !is_same_json(&made.json, &self.definition(kept.id)?) {
                return Err(QueueError::conflict(format!(
                    "taskId `{}` already used by another task.\n\
                     This could be the result of faulty idempotency!",
                    made.task.task_id
                ))
                .into());
            }
            return Ok(kept.task);
        }
        let mut task = made.task;
        let waits = self.has_unmet_dependencies(&made.dependencies, &made.json, &task.task_id)?;
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
        let scopes = serde_json::to_string(&made.scopes).map_err(StoreError::json)?;
        self.conn
            .prepare_cached("INSERT INTO definitions (id, scopes, json) VALUES (?1, ?2, ?3)")?
            .execute(params![id, scopes, made.json])?;
        if waits {
            for needs in &made.dependencies {
                self.conn
                    .prepare_cached("INSERT OR IGNORE INTO dependencies (needs, id) VALUES (?1, ?2)")?
                    .execute(params![needs, id])?;
            }
        }
        self.record_move(id, &task, Position::default())?;
        Ok(task)
    }

    /// Whether a task has to wait for others. Each of them must exist.
    fn has_unmet_dependencies(&self, needed: &[String], definition: &str, own: &str) -> StoreResult<bool> {
        let any_end = serde_json::from_str::<RequiresField<'_>>(definition)
            .is_ok_and(|needs| needs.requires == Some("all-resolved"));
        let mut waits = false;
        for needs in needed {
            if needs == own {
                waits = true;
                continue;
            }
            let Some(kept) = self.find_task(needs)? else {
                return Err(
                    QueueError::input(format!("`task.dependencies` references non-existing tasks: {needs}")).into()
                );
            };
            waits |= !is_met(&kept.task, any_end);
        }
        Ok(waits)
    }

    /// Schedules what waited for a task that is now resolved.
    fn schedule_dependents(&mut self, task: &TaskRecord) -> StoreResult<()> {
        let waiting: Vec<i64> = self
            .conn
            .prepare_cached("SELECT id FROM dependencies WHERE needs = ?1")?
            .query_map([&task.task_id], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        for id in waiting {
            let Some(mut kept) = self.task_by_id(id)?.filter(|kept| kept.task.runs.is_empty()) else {
                continue;
            };
            let definition = self.definition(id)?;
            let needed: DependenciesField = serde_json::from_str(&definition).map_err(StoreError::json)?;
            if !self.has_unmet_dependencies(&needed.dependencies, &definition, &kept.task.task_id)? {
                self.conn.prepare_cached("DELETE FROM dependencies WHERE id = ?1")?.execute([id])?;
                kept.task.schedule(self.now);
                self.save(kept)?;
            }
        }
        Ok(())
    }

    /// The definition of a task, as JSON text.
    pub(crate) fn definition(&self, id: i64) -> StoreResult<String> {
        let mut found = self.conn.prepare_cached("SELECT json FROM definitions WHERE id = ?1")?;
        Ok(found.query_row([id], |row| row.get(0))?)
    }

    /// The scopes that a task's own definition grants it.
    pub(crate) fn scopes(&self, id: i64) -> StoreResult<Vec<String>> {
        let mut found = self.conn.prepare_cached("SELECT scopes FROM definitions WHERE id = ?1")?;
        let text: String = found.query_row([id], |row| row.get(0))?;
        serde_json::from_str(&text).map_err(StoreError::json)
    }

    /// Claims one run, as `claimTask` does.
    pub(crate) fn claim(
        &mut self,
        mut kept: TaskRow,
        run: u32,
        worker: &WorkerIdentity,
    ) -> StoreResult<Result<ClaimedRun, RunError>> {
        let (now, length) = (self.now, self.config.claim_timeout);
        match kept.task.claim(run, worker, ClaimMethod::ClaimTask, now, length) {
            Err(no) => Ok(Err(no)),
            Ok(did) => {
                let definition = self.definition(kept.id)?;
                self.finish_claim(kept, run, did, definition).map(Ok)
            }
        }
    }

    fn finish_claim(
        &mut self,
        kept: TaskRow,
        run: u32,
        did: Transition,
        definition: String,
    ) -> StoreResult<ClaimedRun> {
        let scopes = self.scopes(kept.id)?;
        let task = match did {
            Transition::Unchanged => kept.task,
            Transition::Changed => self.save(kept)?,
        };
        let record = task.runs.get(run as usize);
        if let Some(worker) = record.and_then(|record| record.worker.as_ref()) {
            self.workers.record_claim(&task.queue, worker, &task.task_id, run, self.now);
        }
        let taken_until = record.and_then(|record| record.taken_until).unwrap_or_default();
        Ok(ClaimedRun { run, taken_until, definition, scopes, task })
    }

    /// Claims what is pending in a queue, the most urgent and then the oldest first, as `claimWork` does.
    pub(crate) fn claim_work(
        &mut self,
        queue: &str,
        worker: &WorkerIdentity,
        most: usize,
    ) -> StoreResult<Vec<ClaimedRun>> {
        let next: Vec<i64> =
            self.index.pending(queue).take(most + QUEUE_CLAIM_SCAN_MAX).map(|place| place.id).collect();
        let (now, length) = (self.now, self.config.claim_timeout);
        let messages = self.has_messages(queue)?;
        let (mut given, mut bytes) = (Vec::new(), 0_usize);
        for id in next {
            if given.len() >= most {
                break;
            }
            let Some(mut kept) = self.task_by_id(id)? else { continue };
            let Some((run, _)) = kept.task.pending_run() else { continue };
            // Past its deadline: the resolver has yet to come by.
            let Ok(did) = kept.task.claim(run, worker, ClaimMethod::ClaimWork, now, length) else {
                continue;
            };
            let definition = self.definition(id)?;
            bytes = bytes.saturating_add(definition.len());
            if bytes > QUEUE_REPLY_BYTES_MAX && !given.is_empty() {
                // The rest is for the next call, whose answer can be read.
                break;
            }
            let made = self.finish_claim(kept, run, did, definition)?;
            if messages {
                self.drop_message(&made.task.task_id, made.run)?;
            }
            given.push(made);
        }
        Ok(given)
    }

    /// Takes back claims whose answer nobody received.
    pub(super) fn revert_claim(&mut self, task_id: &str, run: u32) -> StoreResult<()> {
        if let Some(mut kept) = self.find_task(task_id)?
            && kept.task.revert_claim(run) == Transition::Changed
        {
            self.save(kept)?;
        }
        Ok(())
    }

    /// Ends claims and tasks whose time is over, `late` after it was.
    pub(super) fn expire_due(&mut self) -> StoreResult<()> {
        let (claims, deadlines) = (self.claims_due(), self.deadlines_due());
        for id in deadlines {
            if let Some(mut kept) = self.task_by_id(id)?
                && kept.task.expire_deadline(self.now) == Transition::Changed
            {
                self.save(kept)?;
            }
        }
        for id in claims {
            if let Some(mut kept) = self.task_by_id(id)?
                && kept.task.expire_claim(self.now) == Transition::Changed
            {
                self.save(kept)?;
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

    /// How many runs wait in a queue.
    pub(crate) fn count_pending(&self, queue: &str) -> usize {
        self.index.pending_count(queue)
    }

    /// The pending tasks of a queue, the next one first.
    pub(crate) fn list_pending(&self, queue: &str, after: usize, most: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self.index.pending(queue).skip(after).take(most + 1).map(|place| place.id).collect();
        let PartialPage { items, seen, .. } = self.partial_page(&ids, most)?;
        Ok(ListPage { items, next: (seen < ids.len()).then(|| (after + seen).to_string()) })
    }

    /// The tasks of a queue that a worker holds a claim on, the oldest first, from the row after `after`.
    pub(crate) fn list_claimed(&self, queue: &str, after: i64, most: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self.index.claimed(queue, after).take(most + 1).collect();
        self.page(&ids, most)
    }

    /// Every task, the newest first, below row `before`.
    pub(crate) fn list_all(&self, before: i64, most: usize) -> StoreResult<ListPage<ListedTask>> {
        let ids: Vec<i64> = self
            .conn
            .prepare_cached("SELECT id FROM tasks WHERE id < ?1 ORDER BY id DESC LIMIT ?2")?
            .query_map(params![before, i64::try_from(most + 1).unwrap_or(i64::MAX)], |row| row.get(0))?
            .collect::<Result<_, _>>()?;
        self.page(&ids, most)
    }

    /// A page whose next one starts after the row of its last entry.
    fn page(&self, ids: &[i64], most: usize) -> StoreResult<ListPage<ListedTask>> {
        let PartialPage { items, seen, last } = self.partial_page(ids, most)?;
        Ok(ListPage { items, next: last.filter(|_| seen < ids.len()).map(|id| id.to_string()) })
    }

    /// The first of these tasks: so many, and so many bytes of them, but one in any case.
    fn partial_page(&self, ids: &[i64], most: usize) -> StoreResult<PartialPage> {
        let mut part = PartialPage { items: Vec::new(), seen: 0, last: None };
        let mut bytes = 0_usize;
        for id in ids.iter().take(most) {
            let kept = self.task_by_id(*id)?;
            if let Some(kept) = kept {
                let definition = self.definition(*id)?;
                bytes = bytes.saturating_add(definition.len());
                if bytes > QUEUE_REPLY_BYTES_MAX && !part.items.is_empty() {
                    break;
                }
                part.items.push(ListedTask { definition, task: kept.task });
            }
            part.seen += 1;
            part.last = Some(*id);
        }
        Ok(part)
    }

    /// Until when a worker is barred from claiming, where it is.
    pub(crate) fn quarantined(&self, queue: &str, worker: &WorkerIdentity) -> StoreResult<Option<UnixMillis>> {
        let mut found = self.conn.prepare_cached(
            "SELECT until FROM quarantines WHERE queue = ?1 AND worker_group = ?2 AND worker_id = ?3",
        )?;
        let until = found.query_row([queue, &worker.group, &worker.id], |row| row.get(0)).optional()?;
        Ok(until.map(UnixMillis))
    }

    pub(crate) fn is_quarantined(&self, queue: &str, worker: &WorkerIdentity) -> StoreResult<bool> {
        Ok(self.quarantined(queue, worker)?.is_some_and(|until| until > self.now))
    }

    /// Bars a worker from claiming until then; a time in the past lifts it.
    pub(crate) fn quarantine(&mut self, queue: &str, worker: &WorkerIdentity, until: UnixMillis) -> StoreResult<()> {
        self.conn.prepare_cached("INSERT OR REPLACE INTO quarantines VALUES (?1, ?2, ?3, ?4)")?.execute(params![
            queue,
            worker.group,
            worker.id,
            until.0
        ])?;
        self.workers.record_seen(queue, worker, self.now);
        Ok(())
    }

    /// Forgets tasks past their `expires`, with all that belongs to them.
    pub(super) fn remove_expired(&mut self) -> StoreResult<()> {
        let gone: Vec<(i64, String)> = self
            .conn
            .prepare_cached("SELECT id, task_id FROM tasks WHERE expires <= ?1 LIMIT ?2")?
            .query_map(params![self.now.0, sweep_max()], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        for (id, task_id) in gone {
            if let Some(kept) = self.task_by_id(id)? {
                self.moves.push(Move { from: kept.position, to: Position::default() });
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

    /// How long a message about a task is kept.
    pub(super) fn message_expiry(&self, task: &TaskRecord) -> UnixMillis {
        task.deadline.min(self.now.plus(MESSAGE_TTL_MAX))
    }
}

pub(super) fn sweep_max() -> i64 {
    i64::try_from(QUEUE_SWEEP_MAX).unwrap_or(i64::MAX)
}

#[derive(serde::Deserialize)]
struct DependenciesField {
    dependencies: Vec<String>,
}

fn is_met(task: &TaskRecord, any_end: bool) -> bool {
    task.last_run().is_some_and(|(_, run)| match run.state {
        RunState::Completed => true,
        RunState::Failed | RunState::Exception => any_end,
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
