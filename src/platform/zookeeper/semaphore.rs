//! Semaphores: a list of their holders in one node, changed by compare-and-set.
//!
//! A holder that dies keeps its place until the clean-up removes it.

use serde::{Deserialize, Serialize};

use super::client::CreateMode;
use super::frozen_job::FrozenJob;
use super::job_error::JobError;
use super::{Session, client as zk};

/// Who holds a semaphore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The build set.
    pub buildset_path: String,
    /// The job.
    pub job_name: String,
}

/// A semaphore with its number of places, as a playbook names it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Semaphore {
    /// Its name, which is told to the scheduler when a place is free again.
    pub name: String,
    /// Its node.
    pub path: String,
    /// How many may hold it at once.
    pub max: usize,
}

/// The places that a build needs while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Places {
    /// The semaphores.
    pub semaphores: Vec<Semaphore>,
    /// The build or job that takes them.
    pub holder: Holder,
}

impl Places {
    /// The places that the playbooks of a build need; `None` for most builds.
    ///
    /// # Errors
    ///
    /// Fails if its parameters do not say who takes them, in words without the parameters.
    pub fn of_build(params: &[u8], job: &FrozenJob) -> Result<Option<Self>, String> {
        #[derive(Deserialize)]
        struct Params {
            semaphore_handle: Holder,
        }
        if job.semaphores.is_empty() {
            return Ok(None);
        }
        // serde's message may quote the parameters.
        let params: Params = serde_json::from_slice(params)
            .map_err(|_| "its playbooks need semaphores, and it has no semaphore_handle".to_owned())?;
        Ok(Some(Self { semaphores: job.semaphores.clone(), holder: params.semaphore_handle }))
    }
}

impl Session {
    /// Takes a place of each semaphore, or of none. A holder that has a place keeps it.
    ///
    /// # Errors
    ///
    /// See [`JobError`]. What was taken is given back.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: places may be taken.
    pub async fn acquire_semaphores(&self, places: &Places) -> Result<bool, JobError> {
        let Places { semaphores, holder } = places;
        for (index, semaphore) in semaphores.iter().enumerate() {
            let taken = self.change_holders(&semaphore.path, |holders| {
                let has_place = holders.contains(holder);
                if !has_place && holders.len() < semaphore.max {
                    holders.push(holder.clone());
                }
                has_place || holders.contains(holder)
            });
            let taken = taken.await;
            if !matches!(taken, Ok(true)) {
                for earlier in semaphores.iter().take(index) {
                    self.release_semaphore(&earlier.path, holder).await?;
                }
                return taken;
            }
        }
        Ok(true)
    }

    /// Gives a place back. Succeeds if the holder has none.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn release_semaphore(&self, path: &str, holder: &Holder) -> Result<(), JobError> {
        self.change_holders(path, |holders| {
            holders.retain(|other| other != holder);
            true
        })
        .await
        .map(drop)
    }

    /// Gives places back.
    ///
    /// # Errors
    ///
    /// See [`JobError`]. It may be repeated.
    pub async fn release_semaphores(&self, places: &Places) -> Result<(), JobError> {
        for semaphore in &places.semaphores {
            self.release_semaphore(&semaphore.path, &places.holder).await?;
        }
        Ok(())
    }

    /// Removes the holders whose build set is gone, and returns the semaphores that they held.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn release_leaked_semaphores(&self) -> Result<Vec<String>, JobError> {
        let mut folders = vec!["/zuul/global-semaphores".to_owned()];
        let tenants = self.children("/zuul/semaphores").await?.unwrap_or_default();
        folders.extend(tenants.iter().map(|tenant| format!("/zuul/semaphores/{tenant}")));
        let mut released = Vec::new();
        for folder in folders {
            for name in self.children(&folder).await?.unwrap_or_default() {
                let path = format!("{folder}/{name}");
                let holders = match self.semaphore_holders(&path).await {
                    Err(error @ JobError::Unreadable { .. }) => {
                        tracing::warn!("{error}; leaving it alone");
                        continue;
                    }
                    holders => holders?,
                };
                for holder in holders {
                    if self.stat(&holder.buildset_path).await?.is_none() {
                        self.release_semaphore(&path, &holder).await?;
                        released.push(path.clone());
                    }
                }
            }
        }
        Ok(released)
    }

    /// Lists who holds a semaphore.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn semaphore_holders(&self, path: &str) -> Result<Vec<Holder>, JobError> {
        Ok(self.read_holders(path).await?.map(|(holders, _)| holders).unwrap_or_default())
    }

    async fn read_holders(&self, path: &str) -> Result<Option<(Vec<Holder>, i32)>, JobError> {
        let Some((data, stat)) = self.retry(|| self.get(path)).await? else { return Ok(None) };
        let unreadable =
            |error: serde_json::Error| JobError::Unreadable { path: path.to_owned(), message: error.to_string() };
        let holders = if data.is_empty() { Vec::new() } else { serde_json::from_slice(&data).map_err(unreadable)? };
        Ok(Some((holders, stat.version)))
    }

    /// `change` may be called again, where another process was faster.
    async fn change_holders(&self, path: &str, change: impl Fn(&mut Vec<Holder>) -> bool) -> Result<bool, JobError> {
        loop {
            let Some((mut holders, version)) = self.read_holders(path).await? else {
                let parent = path.rsplit_once('/').map_or("", |(parent, _)| parent);
                self.ensure(parent).await?;
                match self.create(path, b"[]", CreateMode::Persistent).await {
                    Err(error) if error.cause != zk::Error::NodeExists => return Err(error.into()),
                    Ok(_) | Err(_) => continue,
                }
            };
            let before = holders.clone();
            let is_done = change(&mut holders);
            if holders == before {
                return Ok(is_done);
            }
            let data = serde_json::to_vec(&holders).unwrap_or_default();
            match self.set(path, &data, Some(version)).await {
                Ok(_) => return Ok(is_done),
                // Another process was faster, or the answer was lost and the next read shows the change.
                Err(error) if error.cause == zk::Error::BadVersion || error.is_unanswered() && !self.is_ended() => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
