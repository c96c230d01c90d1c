//! What the store knows of artifacts. Their content lies in files, which are not its business.

use rusqlite::{OptionalExtension, Row, params};
use serde_json::{Value, json};

use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::StoreError;
use super::tx::{ListPage, Tx, sweep_max};

/// What is known of an artifact.
#[derive(Debug, Clone)]
pub(crate) struct Artifact {
    pub(crate) name: String,
    pub(crate) storage: String,
    pub(crate) content_type: String,
    pub(crate) expires: UnixMillis,
    pub(crate) present: bool,
    pub(crate) details: Value,
}

type StoreResult<T> = Result<T, StoreError>;

const COLUMNS: &str = "name, storage, content_type, expires, present, details";

impl Tx<'_> {
    pub(crate) fn find_artifact(&self, task: &str, run: u32, name: &str) -> StoreResult<Option<Artifact>> {
        let mut found = self.conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM artifacts WHERE task_id = ?1 AND run = ?2 AND name = ?3"
        ))?;
        Ok(found.query_row(params![task, run, name], read_artifact).optional()?)
    }

    /// The artifacts of a run by name, from the one after `after`.
    pub(crate) fn list_artifacts(
        &self,
        task: &str,
        run: u32,
        after: &str,
        most: usize,
    ) -> StoreResult<ListPage<Artifact>> {
        let limit = i64::try_from(most + 1).unwrap_or(i64::MAX);
        let mut items: Vec<Artifact> = self
            .conn
            .prepare_cached(&format!(
                "SELECT {COLUMNS} FROM artifacts WHERE task_id = ?1 AND run = ?2 AND name > ?3 ORDER BY name LIMIT ?4"
            ))?
            .query_map(params![task, run, after, limit], read_artifact)?
            .collect::<Result<_, _>>()?;
        let more = items.len() > most;
        items.truncate(most);
        let next = items.last().filter(|_| more).map(|last| last.name.clone());
        Ok(ListPage { items, next })
    }

    /// Stores a new artifact, or replaces one where that is allowed. Answers with what is kept.
    pub(crate) fn put_artifact(&mut self, task: &str, run: u32, made: Artifact) -> StoreResult<Artifact> {
        let mut made = made;
        if let Some(old) = self.find_artifact(task, run, &made.name)? {
            if !may_replace(&old, &made) {
                let shown = json!({
                    "storageType": old.storage, "contentType": old.content_type, "expires": old.expires.iso(),
                });
                return Err(QueueError::conflict(format!(
                    "Artifact already exists with different properties, and none of the allowed exceptions apply: {}",
                    in_order(&shown, &["storageType", "contentType", "expires"]),
                ))
                .into());
            }
            made.present |= old.present && old.storage == made.storage;
            if made.storage == "object" {
                made.details = old.details;
            }
            if made.storage == "link" {
                made.content_type = old.content_type;
            }
        }
        self.conn
            .prepare_cached(
                "INSERT OR REPLACE INTO artifacts (task_id, run, name, storage, content_type, expires, present, \
                 details) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            )?
            .execute(params![
                task,
                run,
                made.name,
                made.storage,
                made.content_type,
                made.expires.0,
                made.present,
                made.details.to_string(),
            ])?;
        Ok(made)
    }

    pub(crate) fn mark_artifact_present(&mut self, task: &str, run: u32, name: &str) -> StoreResult<()> {
        self.conn
            .prepare_cached("UPDATE artifacts SET present = 1 WHERE task_id = ?1 AND run = ?2 AND name = ?3")?
            .execute(params![task, run, name])?;
        Ok(())
    }

    pub(super) fn remove_expired_artifacts(&mut self) -> StoreResult<()> {
        let gone: Vec<(String, u32, String)> = self
            .conn
            .prepare_cached("SELECT task_id, run, name FROM artifacts WHERE expires <= ?1 LIMIT ?2")?
            .query_map(params![self.now.0, sweep_max()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
            .collect::<Result<_, _>>()?;
        for (task, run, name) in gone {
            self.conn
                .prepare_cached("DELETE FROM artifacts WHERE task_id = ?1 AND run = ?2 AND name = ?3")?
                .execute(params![task, run, name])?;
            self.files_to_remove.push(super::super::artifact_files::relative_path(&task, run, &name));
        }
        Ok(())
    }
}

fn read_artifact(row: &Row<'_>) -> rusqlite::Result<Artifact> {
    Ok(Artifact {
        name: row.get(0)?,
        storage: row.get(1)?,
        content_type: row.get(2)?,
        expires: UnixMillis(row.get(3)?),
        present: row.get(4)?,
        details: serde_json::from_str(row.get_ref(5)?.as_str()?).unwrap_or_default(),
    })
}

/// Whether a second call with other properties is one of those allowed: a later end, a new place of a reference, a
/// link in the place of a reference.
fn may_replace(old: &Artifact, new: &Artifact) -> bool {
    if new.storage != "link" && old.content_type != new.content_type {
        return false;
    }
    if old.expires > new.expires {
        return false;
    }
    if old.storage != new.storage {
        return old.storage == "reference" && new.storage == "link";
    }
    // The upload of an object is named by the queue, so a repeated call cannot name it.
    old.details == new.details || matches!(new.storage.as_str(), "reference" | "object")
}

/// A JSON object with its properties in this order, spread over lines.
fn in_order(value: &Value, names: &[&str]) -> String {
    let lines: Vec<_> =
        names.iter().filter_map(|name| value.get(name).map(|value| format!("  \"{name}\": {value}"))).collect();
    format!("{{\n{}\n}}", lines.join(",\n"))
}
