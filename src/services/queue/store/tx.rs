//! One job's view of the store: the tables of tasks. A job runs in a savepoint.

use std::collections::BTreeMap;

use rusqlite::types::FromSql;
use rusqlite::{Connection, Params, Row, ToSql, params, params_from_iter};

use super::super::clock::UnixMillis;
use super::super::config::Config;
use super::super::queue_error::QueueError;
use super::super::task_definition::{NewTask, Requires};
use super::super::task_state::{Priority, RunRecord, RunState, TaskRecord, WorkerIdentity};
use super::StoreError;
use super::activity::TaskEvent;
use super::writer::Effects;
use journeyman_domain::limits::{QUEUE_DEADLINE_DELAY, QUEUE_REPLY_BYTES_MAX, QUEUE_SWEEP_MAX, QUEUE_WORKER_TASKS_MAX};

#[derive(Debug)]
pub(crate) struct TaskRow {
    pub(crate) id: i64,
    pub(crate) task: TaskRecord,
    /// It was not resolved when it was read.
    was_open: bool,
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
pub(crate) struct QueueSummary {
    pub(crate) name: String,
    pub(crate) last_created: UnixMillis,
    pub(crate) expires: UnixMillis,
}

#[derive(Debug)]
pub(crate) struct WorkerSeen {
    pub(crate) worker: WorkerIdentity,
    pub(crate) first_claim: UnixMillis,
    /// The newest task of those that it claimed.
    pub(crate) task: String,
    pub(crate) run: usize,
}

#[derive(Debug)]
pub(crate) struct ListPage<T> {
    pub(crate) items: Vec<T>,
    /// Offset of the next page, if there is one.
    pub(crate) next: Option<u32>,
}

impl<T> ListPage<T> {
    /// The items may be one more than the page holds: another page follows then.
    pub(super) fn of(mut items: Vec<T>, page: PageRequest) -> Self {
        let next = (items.len() > page.limit as usize).then_some(page.offset.saturating_add(page.limit));
        items.truncate(page.limit as usize);
        Self { items, next }
    }
}

/// An empty text matches every task.
#[derive(Debug)]
pub(crate) struct TaskFilter {
    pub(crate) queue: String,
    pub(crate) state: String,
    /// A part of the name, in any case.
    pub(crate) name: String,
    pub(crate) since: UnixMillis,
}

impl TaskFilter {
    /// The states that are rare in a long history are found by an index each. The parameters begin at `?3`.
    pub(super) fn condition(&self) -> String {
        let of_queue = if self.queue.is_empty() { "" } else { "queue = ?3 AND" };
        let of_state = match self.state.as_str() {
            "" => "",
            "pending" => "id IN (SELECT id FROM tasks WHERE pending_since IS NOT NULL) AND",
            "running" => "id IN (SELECT id FROM tasks WHERE taken_until IS NOT NULL) AND",
            "failed" => "id IN (SELECT id FROM tasks WHERE state = 'failed') AND",
            "exception" => "id IN (SELECT id FROM tasks WHERE state = 'exception') AND",
            _ => "state = ?4 AND",
        };
        format!("{of_queue} {of_state} (?5 = '' OR instr(lower(name), lower(?5))) AND created >= ?6 ORDER BY id DESC")
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PageRequest {
    pub(crate) offset: u32,
    pub(crate) limit: u32,
}

pub(crate) struct Tx<'a> {
    pub(super) conn: &'a Connection,
    pub(crate) config: &'a Config,
    pub(crate) now: UnixMillis,
    pub(super) effects: Effects,
}

pub(super) type StoreResult<T> = Result<T, StoreError>;

impl<'a> Tx<'a> {
    pub(crate) fn new(conn: &'a Connection, config: &'a Config) -> Self {
        Tx { conn, config, now: config.clock.now(), effects: Effects::default() }
    }

    /// Returns how many rows the statement has changed.
    pub(super) fn execute(&self, sql: &str, values: impl Params) -> StoreResult<usize> {
        Ok(self.conn.prepare_cached(sql)?.execute(values)?)
    }

    /// Returns the value of a statement with one row of one column.
    pub(super) fn query_one<T: FromSql>(&self, sql: &str, values: impl Params) -> StoreResult<T> {
        Ok(self.conn.prepare_cached(sql)?.query_row(values, |row| row.get(0))?)
    }

    pub(super) fn query<T>(
        &self,
        sql: &str,
        values: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> StoreResult<Vec<T>> {
        let mut statement = self.conn.prepare_cached(sql)?;
        Ok(statement.query_map(values, read)?.collect::<Result<_, _>>()?)
    }

    pub(crate) fn find_task(&self, task_id: &str) -> StoreResult<Option<TaskRow>> {
        Ok(self.tasks("WHERE task_id = ?1", [task_id])?.pop())
    }

    pub(crate) fn require_task(&self, task_id: &str) -> StoreResult<TaskRow> {
        self.find_task(task_id)?.ok_or_else(|| QueueError::not_found(format!("task `{task_id}` not found")).into())
    }

    pub(super) fn tasks(&self, condition: &str, params: impl Params) -> StoreResult<Vec<TaskRow>> {
        let select = format!(
            "SELECT id, task_id, queue, scheduler, project, task_group, priority, deadline, expires, retries, \
             retries_left, runs, name, created FROM tasks {condition}"
        );
        self.query(&select, params, read_task)
    }

    /// Writes a task back, with a new message if a run became pending, and schedules the dependents of a resolved task.
    pub(crate) fn save(&mut self, row: TaskRow) -> StoreResult<TaskRecord> {
        let TaskRow { id, task, was_open } = row;
        let runs = serde_json::to_string(&task.runs).map_err(StoreError::json)?;
        let pending_since = task.pending_run().map(|(_, run)| run.scheduled.0);
        let taken_until = task.running_until().map(|until| until.0);
        let open_until = task.is_open().then_some(task.deadline.0);
        let update = "UPDATE tasks SET retries_left = ?2, runs = ?3, pending_since = ?4, taken_until = ?5, \
                      open_until = ?6, visible = iif(?4 IS NULL, visible, 0), dequeued = iif(?4 IS NULL, dequeued, 0), \
                      receipt = iif(?4 IS NULL, receipt, '') WHERE id = ?1";
        self.execute(update, params![id, task.retries_left, runs, pending_since, taken_until, open_until])?;
        if pending_since.is_some() {
            self.effects.queues_with_work.push(task.queue.clone());
        }
        if open_until.is_none() {
            if let Some(last) = task.runs.last().filter(|_| was_open) {
                self.effects.events.push((task.queue.clone(), TaskEvent::Resolved(last.state), self.now));
            }
            self.announce(&task)?;
            self.schedule_dependents(&task)?;
        }
        Ok(task)
    }

    /// Creating a task with the same definition again returns the existing task.
    pub(crate) fn create_task(&mut self, new_task: NewTask) -> StoreResult<TaskRecord> {
        if let Some(row) = self.find_task(&new_task.task.task_id)? {
            let value = |json: &str| serde_json::from_slice::<serde_json::Value>(json.as_bytes()).ok();
            let stored = self.definition(row.id)?;
            if new_task.json != stored && value(&new_task.json) != value(&stored) {
                let message = format!("taskId `{}` is already used by another task", row.task.task_id);
                return Err(QueueError::conflict(message).into());
            }
            return Ok(row.task);
        }
        let unmet = self.unmet_dependencies(&new_task)?;
        let mut task = new_task.task;
        if unmet.is_empty() {
            task.schedule(self.now);
        }
        let insert = "INSERT INTO tasks (task_id, queue, scheduler, project, task_group, priority, deadline, expires, \
                      retries, retries_left, runs, name, created) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?9, '[]', ?10, ?11)";
        let values = params![
            task.task_id,
            task.queue,
            task.scheduler,
            task.project,
            task.group,
            task.priority.rank(),
            task.deadline.0,
            task.expires.0,
            task.retries,
            task.name,
            task.created.0,
        ];
        self.execute(insert, values)?;
        let id = self.conn.last_insert_rowid();
        let scopes = serde_json::to_string(&new_task.scopes).map_err(StoreError::json)?;
        let insert = "INSERT INTO definitions (id, scopes, json) VALUES (?1, ?2, ?3)";
        self.execute(insert, params![id, scopes, new_task.json])?;
        let insert = "INSERT OR IGNORE INTO dependencies (needs, id) VALUES (?1, ?2)";
        for needs in &unmet {
            self.execute(insert, params![needs, id])?;
        }
        self.effects.events.push((task.queue.clone(), TaskEvent::Created, self.now));
        self.save(TaskRow { id, task, was_open: true })
    }

    /// Fails if a dependency does not exist. A task that needs itself waits until its deadline.
    fn unmet_dependencies(&self, new_task: &NewTask) -> StoreResult<Vec<String>> {
        let mut unmet = Vec::new();
        for needs in &new_task.dependencies {
            if *needs != new_task.task.task_id {
                let row = self.find_task(needs)?.ok_or_else(|| {
                    QueueError::input(format!("`task.dependencies` references non-existing tasks: {needs}"))
                })?;
                if is_met(&row.task, new_task.requires) {
                    continue;
                }
            }
            unmet.push(needs.clone());
        }
        Ok(unmet)
    }

    /// A dependency is crossed off once it is met, so a dependent does not need it after it has expired.
    fn schedule_dependents(&mut self, task: &TaskRecord) -> StoreResult<()> {
        let waiting =
            self.tasks("WHERE runs = '[]' AND id IN (SELECT id FROM dependencies WHERE needs = ?1)", [&task.task_id])?;
        for mut row in waiting {
            let DependencyFields { requires } =
                serde_json::from_slice(self.definition(row.id)?.as_bytes()).map_err(StoreError::json)?;
            if !is_met(task, requires) {
                continue;
            }
            let delete = "DELETE FROM dependencies WHERE needs = ?1 AND id = ?2";
            self.execute(delete, params![task.task_id, row.id])?;
            if !self.conn.prepare_cached("SELECT 1 FROM dependencies WHERE id = ?1")?.exists([row.id])? {
                row.task.schedule(self.now);
                self.save(row)?;
            }
        }
        Ok(())
    }

    pub(crate) fn definition(&self, id: i64) -> StoreResult<String> {
        self.query_one("SELECT json FROM definitions WHERE id = ?1", [id])
    }

    pub(crate) fn scopes(&self, id: i64) -> StoreResult<Vec<String>> {
        let text: String = self.query_one("SELECT scopes FROM definitions WHERE id = ?1", [id])?;
        serde_json::from_slice(text.as_bytes()).map_err(StoreError::json)
    }

    pub(crate) fn claim(&mut self, mut row: TaskRow, run: u32, worker: &WorkerIdentity) -> StoreResult<ClaimedRun> {
        row.task.claim(run, worker, self.now, self.config.claim_timeout)?;
        let definition = self.definition(row.id)?;
        self.save_claim(row, run, Some(definition))
    }

    /// Saves a task whose `run` was claimed, or reclaimed, which needs no definition.
    pub(crate) fn save_claim(&mut self, row: TaskRow, run: u32, definition: Option<String>) -> StoreResult<ClaimedRun> {
        let scopes = self.scopes(row.id)?;
        let task = self.save(row)?;
        let taken_until = task.running_until().unwrap_or_default();
        Ok(ClaimedRun { run, taken_until, definition, scopes, task })
    }

    /// `claimWork`: claims the most urgent and then the oldest pending runs.
    pub(crate) fn claim_work(
        &mut self,
        queue: &str,
        worker: &WorkerIdentity,
        limit: u8,
    ) -> StoreResult<Vec<ClaimedRun>> {
        let (now, length) = (self.now, self.config.claim_timeout);
        let (mut claimed, mut bytes) = (Vec::new(), 0_usize);
        let pending = self.tasks(
            "WHERE queue = ?1 AND pending_since IS NOT NULL AND deadline > ?2 \
             ORDER BY priority DESC, pending_since, id LIMIT ?3",
            params![queue, now.0, limit],
        )?;
        for mut row in pending {
            let Some((run, _)) = row.task.pending_run() else { continue };
            let definition = self.definition(row.id)?;
            bytes = bytes.saturating_add(definition.len());
            if bytes > QUEUE_REPLY_BYTES_MAX && !claimed.is_empty() {
                // The worker limits the size of a response; the next call gets the rest.
                break;
            }
            if row.task.claim(run, worker, now, length).is_ok() {
                claimed.push(self.save_claim(row, run, Some(definition))?);
            }
        }
        Ok(claimed)
    }

    /// Resolves tasks past their deadline and claims that have expired.
    pub(super) fn expire_due(&mut self) -> StoreResult<()> {
        let due = params![self.now.minus(QUEUE_DEADLINE_DELAY).0, QUEUE_SWEEP_MAX];
        for mut row in self.tasks("WHERE open_until <= ?1 LIMIT ?2", due)? {
            row.task.expire_deadline(self.now);
            self.save(row)?;
        }
        let due = params![self.now.minus(self.config.claim_delay).0, QUEUE_SWEEP_MAX];
        for mut row in self.tasks("WHERE taken_until <= ?1 LIMIT ?2", due)? {
            row.task.expire_claim(self.now);
            self.save(row)?;
        }
        Ok(())
    }

    /// Unresolved tasks stay: their dependents wait for a result.
    pub(super) fn remove_expired(&mut self) -> StoreResult<()> {
        let delete = "DELETE FROM tasks WHERE id IN (SELECT id FROM tasks WHERE expires <= ?1 AND open_until IS NULL \
                      LIMIT ?2) RETURNING task_id";
        let tasks: Vec<String> = self.query(delete, params![self.now.0, QUEUE_SWEEP_MAX], |row| row.get(0))?;
        self.effects.files_to_remove.extend(tasks);
        self.remove_expired_artifacts()
    }

    pub(crate) fn count_pending(&self, queue: &str) -> StoreResult<u32> {
        self.query_one("SELECT count(*) FROM tasks WHERE queue = ?1 AND pending_since IS NOT NULL", [queue])
    }

    pub(crate) fn count_claimed(&self, queue: &str) -> StoreResult<u32> {
        self.query_one("SELECT count(*) FROM tasks WHERE queue = ?1 AND taken_until IS NOT NULL", [queue])
    }

    /// Lists the queues by name, each with the times of its latest task.
    pub(crate) fn list_task_queues(&self, page: PageRequest) -> StoreResult<ListPage<QueueSummary>> {
        let read = |row: &Row<'_>| {
            let (created, expires) = (UnixMillis(row.get(1)?), UnixMillis(row.get(2)?));
            Ok(QueueSummary { name: row.get(0)?, last_created: created, expires })
        };
        // Goes from queue to queue in the index, because there are few queues and many tasks.
        let select = "WITH RECURSIVE names (queue) AS (SELECT min(queue) FROM tasks UNION ALL \
                      SELECT (SELECT min(queue) FROM tasks WHERE queue > names.queue) FROM names WHERE queue IS NOT NULL) \
                      SELECT tasks.queue, created, expires FROM names \
                      JOIN tasks ON id = (SELECT max(id) FROM tasks WHERE queue = names.queue) \
                      ORDER BY tasks.queue LIMIT ?1 OFFSET ?2";
        let found = self.query(select, [page.limit.saturating_add(1), page.offset], read)?;
        Ok(ListPage::of(found, page))
    }

    /// The time at which the run that has been pending for longest was scheduled.
    pub(crate) fn oldest_pending(&self, queue: &str) -> StoreResult<Option<UnixMillis>> {
        let select = "SELECT min(pending_since) FROM tasks WHERE queue = ?1 AND pending_since IS NOT NULL";
        Ok(self.query_one::<Option<i64>>(select, [queue])?.map(UnixMillis))
    }

    /// Lists the workers by group and id, from the runs of the tasks that are claimed and of the latest ones.
    pub(crate) fn list_workers(&self, queue: &str, page: PageRequest) -> StoreResult<ListPage<WorkerSeen>> {
        let latest = params![queue, QUEUE_WORKER_TASKS_MAX];
        let mut workers = BTreeMap::new();
        // The latest ones may all be pending.
        let claimed = self.tasks("WHERE queue = ?1 AND taken_until IS NOT NULL ORDER BY id DESC LIMIT ?2", latest)?;
        let latest = self.tasks("WHERE queue = ?1 ORDER BY id DESC LIMIT ?2", latest)?;
        for TaskRow { task, .. } in claimed.into_iter().chain(latest) {
            for (run, record) in task.runs.into_iter().enumerate().rev() {
                let (Some(worker), Some(started)) = (record.worker, record.started) else { continue };
                let key = (worker.group.clone(), worker.id.clone());
                let seen = || WorkerSeen { worker, first_claim: started, task: task.task_id.clone(), run };
                let known = workers.entry(key).or_insert_with(seen);
                known.first_claim = known.first_claim.min(started);
            }
        }
        let (offset, limit) = (page.offset as usize, page.limit as usize);
        Ok(ListPage::of(workers.into_values().skip(offset).take(limit + 1).collect(), page))
    }

    /// The tasks that exist, in the given order.
    pub(crate) fn named_tasks(&self, ids: &[String], page: PageRequest) -> StoreResult<ListPage<ListedTask>> {
        let ids = serde_json::to_string(ids).map_err(StoreError::json)?;
        let condition = "task_id IN (SELECT value FROM json_each(?3)) ORDER BY instr(?3, task_id)";
        self.list_tasks(condition, &[&ids], page)
    }

    /// Next to be claimed first.
    pub(crate) fn list_pending(&self, queue: &str, page: PageRequest) -> StoreResult<ListPage<ListedTask>> {
        let condition = "queue = ?3 AND pending_since IS NOT NULL ORDER BY priority DESC, pending_since, id";
        self.list_tasks(condition, &[&queue], page)
    }

    /// Oldest first.
    pub(crate) fn list_claimed(&self, queue: &str, page: PageRequest) -> StoreResult<ListPage<ListedTask>> {
        self.list_tasks("queue = ?3 AND taken_until IS NOT NULL ORDER BY id", &[&queue], page)
    }

    /// Oldest first.
    pub(crate) fn list_group(&self, group: &str, page: PageRequest) -> StoreResult<ListPage<ListedTask>> {
        self.list_tasks("task_group = ?3 ORDER BY id", &[&group], page)
    }

    /// Newest first.
    pub(crate) fn find_tasks(&self, filter: &TaskFilter, page: PageRequest) -> StoreResult<ListPage<TaskRow>> {
        let TaskFilter { queue, state, name, since } = filter;
        self.task_page(&filter.condition(), &[queue, state, name, &since.0], page)
    }

    /// The parameters of the condition begin at `?3`.
    fn task_page(&self, condition: &str, values: &[&dyn ToSql], page: PageRequest) -> StoreResult<ListPage<TaskRow>> {
        let bounds: [&dyn ToSql; 2] = [&page.limit.saturating_add(1), &page.offset];
        let all: Vec<_> = bounds.iter().chain(values).collect();
        let found = self.tasks(&format!("WHERE {condition} LIMIT ?1 OFFSET ?2"), params_from_iter(all))?;
        Ok(ListPage::of(found, page))
    }

    /// The tasks have at most `QUEUE_REPLY_BYTES_MAX` bytes, but there is at least one.
    fn list_tasks(
        &self,
        condition: &str,
        values: &[&dyn ToSql],
        page: PageRequest,
    ) -> StoreResult<ListPage<ListedTask>> {
        let found = self.task_page(condition, values, page)?;
        let (mut items, mut bytes) = (Vec::new(), 0_usize);
        for (row, count) in found.items.into_iter().zip(0..) {
            let definition = self.definition(row.id)?;
            bytes = bytes.saturating_add(definition.len());
            if count > 0 && bytes > QUEUE_REPLY_BYTES_MAX {
                return Ok(ListPage { items, next: Some(page.offset.saturating_add(count)) });
            }
            items.push(ListedTask { definition, task: row.task });
        }
        Ok(ListPage { items, next: found.next })
    }

    pub(crate) fn last_to_expire(&self, group: &str) -> StoreResult<TaskRecord> {
        let first = self.tasks("WHERE task_group = ?1 ORDER BY expires DESC LIMIT 1", [group])?.pop();
        first.map(|row| row.task).ok_or_else(|| QueueError::not_found(format!("no task-group `{group}`")).into())
    }

    /// Ids of all tasks of a group, or of the unresolved ones.
    pub(crate) fn ids_of_group(&self, group: &str, open_only: bool) -> StoreResult<Vec<String>> {
        let select =
            "SELECT task_id FROM tasks WHERE task_group = ?1 AND (NOT ?2 OR open_until IS NOT NULL) ORDER BY id";
        self.query(select, params![group, open_only], |row| row.get(0))
    }
}

#[derive(serde::Deserialize)]
struct DependencyFields {
    requires: Requires,
}

fn is_met(task: &TaskRecord, requires: Requires) -> bool {
    task.last_run().is_some_and(|(_, run)| match run.state {
        RunState::Completed => true,
        RunState::Failed | RunState::Exception => requires == Requires::AllResolved,
        RunState::Pending | RunState::Running => false,
    })
}

fn read_task(row: &Row<'_>) -> rusqlite::Result<TaskRow> {
    let runs = row.get_ref(11)?.as_str()?;
    let runs: Vec<RunRecord> = serde_json::from_slice(runs.as_bytes())
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
        name: row.get(12)?,
        created: UnixMillis(row.get(13)?),
        retries: row.get(9)?,
        retries_left: row.get(10)?,
        runs,
    };
    Ok(TaskRow { id: row.get(0)?, was_open: task.is_open(), task })
}
