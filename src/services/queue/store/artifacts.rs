//! The `artifacts` table. Content is in files.

use rusqlite::{OptionalExtension, Row, params};
use serde_json::Value;

use super::super::clock::UnixMillis;
use super::super::queue_error::QueueError;
use super::tx::{ListPage, PageRequest, StoreResult, Tx};
use journeyman_domain::limits::QUEUE_SWEEP_MAX;

#[derive(Debug, Clone)]
pub(crate) struct Artifact {
    pub(crate) name: String,
    pub(crate) storage: String,
    pub(crate) content_type: String,
    pub(crate) expires: UnixMillis,
    pub(crate) details: Value,
}

const COLUMNS: &str = "name, storage, content_type, expires, details";

impl Tx<'_> {
    pub(crate) fn find_artifact(&self, task: &str, run: u32, name: &str) -> StoreResult<Option<Artifact>> {
        let mut found = self.conn.prepare_cached(&format!(
            "SELECT {COLUMNS} FROM artifacts WHERE task_id = ?1 AND run = ?2 AND name = ?3"
        ))?;
        Ok(found.query_row(params![task, run, name], read_artifact).optional()?)
    }

    /// Ordered by name.
    pub(crate) fn list_artifacts(&self, task: &str, run: u32, page: PageRequest) -> StoreResult<ListPage<Artifact>> {
        let select =
            format!("SELECT {COLUMNS} FROM artifacts WHERE task_id = ?1 AND run = ?2 ORDER BY name LIMIT ?3 OFFSET ?4");
        let values = params![task, run, page.limit.saturating_add(1), page.offset];
        Ok(ListPage::of(self.query(&select, values, read_artifact)?, page))
    }

    /// Inserts an artifact, or replaces one if [`may_replace`] allows it.
    pub(crate) fn put_artifact(&mut self, task: &str, run: u32, artifact: Artifact) -> StoreResult<Artifact> {
        if self.find_artifact(task, run, &artifact.name)?.is_some_and(|old| !may_replace(&old, &artifact)) {
            return Err(QueueError::conflict("the artifact already exists with different properties").into());
        }
        let insert = "INSERT OR REPLACE INTO artifacts (task_id, run, name, storage, content_type, expires, details) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
        let Artifact { name, storage, content_type, expires, details } = &artifact;
        self.execute(insert, params![task, run, name, storage, content_type, expires.0, details.to_string()])?;
        Ok(artifact)
    }

    pub(super) fn remove_expired_artifacts(&mut self) -> StoreResult<()> {
        let delete = "DELETE FROM artifacts WHERE (task_id, run, name) IN (SELECT task_id, run, name FROM artifacts \
                      WHERE expires <= ?1 LIMIT ?2) RETURNING task_id, run, name";
        let gone: Vec<(String, u32, String)> = self
            .query(delete, params![self.now.0, QUEUE_SWEEP_MAX], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
        for (task, run, name) in gone {
            self.effects.files_to_remove.push(super::super::artifact_files::relative_path(&task, run, &name));
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
        details: serde_json::from_slice(row.get_ref(4)?.as_str()?.as_bytes()).unwrap_or_default(),
    })
}

/// Allows a later expiry, a new URL of a reference, and a link in place of a reference.
fn may_replace(old: &Artifact, new: &Artifact) -> bool {
    if old.expires > new.expires || (new.storage != "link" && old.content_type != new.content_type) {
        return false;
    }
    if old.storage != new.storage {
        return old.storage == "reference" && new.storage == "link";
    }
    old.details == new.details || new.storage == "reference"
}
