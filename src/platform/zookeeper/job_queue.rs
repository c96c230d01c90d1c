//! Zuul's job request queue, from both sides: submitting, claiming, completing and removing requests.
//!
//! A queue is a folder of `requests`, `locks`, `params`, `result-data`, `results` and `waiters`, each with a node for each request.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::client::CreateMode;
use super::event_queue::EventQueue;
use super::frozen_job::FrozenJob;
pub use super::job_error::JobError;
use super::json_object::JsonObject;
use super::lock::{HeldLock, LockMode};
use super::semaphore::Places;
use super::shards::{self, FIRST_SHARD, ShardError};
use super::{Error, Session, Write, client as zk};
use crate::host::crash_points::crash_point;
use journeyman_domain::limits::ZOOKEEPER_EVENT_BYTES_MAX;

const FOLDERS: [&str; 6] = ["requests", "locks", "params", "result-data", "results", "waiters"];

/// The state of a request. Its outcome is in its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RequestState {
    /// Not in the queue.
    Unsubmitted,
    /// Is held back until its submitter sets it to requested.
    Hold,
    /// Waits for a worker.
    Requested,
    /// A worker holds it.
    Running,
    /// A worker holds it, and its payload waits to be resumed.
    Paused,
    /// It has ended; its submitter removes it.
    Completed,
}

/// A request, with every key that this program does not know.
#[derive(Debug, Clone)]
pub struct JobRequest {
    /// The id, which is the name of its nodes.
    pub id: String,
    /// Its JSON.
    pub json: JsonObject,
    /// The version of its node that was read.
    pub version: i32,
}

impl JobRequest {
    /// The state; `None` if this program does not know it.
    pub fn state(&self) -> Option<RequestState> {
        self.json.get("state")
    }

    fn is_requested(&self) -> bool {
        self.state() == Some(RequestState::Requested)
    }
}

pub const MERGE_COMPLETED: &str = "MergeCompletedEvent";

/// The event that ends a merge job without a waiter.
pub fn merge_event_kind(request: &JobRequest) -> &'static str {
    let job_type = request.json.get::<String>("job_type");
    if job_type.as_deref() == Some("fileschanges") { "FilesChangesCompletedEvent" } else { MERGE_COMPLETED }
}

/// A queue of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobQueue {
    root: String,
}

/// A try to claim a request.
#[derive(Debug)]
pub enum ClaimAttempt {
    /// It is this worker's.
    Claimed(Box<ClaimedRequest>),
    /// It waits for a worker, and another process holds its lock.
    Locked,
    /// A semaphore that it needs has no free place.
    Waits,
    /// It is gone, or waits for no worker.
    Settled,
}

/// A request that this worker holds.
#[derive(Debug)]
pub struct ClaimedRequest {
    /// The request as it was written last.
    pub request: JobRequest,
    /// Its parameters, or why there are none.
    pub params: Result<Vec<u8>, String>,
    /// The job of a build.
    pub job: Option<Box<FrozenJob>>,
    /// The places of semaphores that were taken for it.
    pub places: Option<Places>,
    /// The right to run it.
    pub lock: HeldLock,
}

enum Start {
    Started {
        request: JobRequest,
        params: Result<Vec<u8>, String>,
        job: Option<Box<FrozenJob>>,
        places: Option<Places>,
    },
    Settled,
    Waits,
}

impl JobQueue {
    /// The queue below this path, such as `/zuul/merger`.
    pub fn new(root: &str) -> Self {
        Self { root: root.to_owned() }
    }

    /// The path of the queue.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// The node of a request in one of the queue's folders.
    pub fn path(&self, folder: &str, id: &str) -> String {
        format!("{}/{folder}/{id}", self.root)
    }

    /// The node that asks the worker of a build to stop it.
    pub fn cancel_flag(&self, id: &str) -> String {
        format!("{}/requests/{id}/cancel", self.root)
    }

    /// The node that lets the worker of a paused build go on.
    pub fn resume_flag(&self, id: &str) -> String {
        format!("{}/requests/{id}/resume", self.root)
    }

    /// Creates its folders. Every party does, since any may be the first.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn ensure(&self, session: &Session) -> Result<(), Error> {
        for folder in FOLDERS {
            let path = format!("{}/{folder}", self.root);
            session.retry(|| session.ensure(&path)).await?;
        }
        Ok(())
    }

    /// Reads a request; `None` if it is gone.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn read(&self, session: &Session, id: &str) -> Result<Option<JobRequest>, JobError> {
        let path = self.path("requests", id);
        let Some((data, stat)) = session.retry(|| session.get(&path)).await? else { return Ok(None) };
        let json =
            JsonObject::parse(&data).map_err(|error| JobError::Unreadable { path, message: error.to_string() })?;
        Ok(Some(JobRequest { id: id.to_owned(), json, version: stat.version }))
    }

    /// Adds a request with its parameters.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: parameters without a request may remain.
    pub async fn submit(
        &self,
        session: &Session,
        id: &str,
        request: &JsonObject,
        params: &[u8],
    ) -> Result<(), JobError> {
        session.write_shards(&self.path("params", id), params).await?;
        let data = self.to_bytes(id, request)?;
        // Workers see it from here on.
        session.create(&self.path("requests", id), &data, CreateMode::Persistent).await?;
        Ok(())
    }

    /// Claims a request: takes its lock, looks at it again, and sets it to running.
    ///
    /// # Errors
    ///
    /// See [`JobError`]. The lock is given up, unless the session is disturbed.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the request may stay locked until the session ends.
    pub async fn claim(
        &self,
        session: &Arc<Session>,
        id: &str,
        worker_info: Option<&Value>,
    ) -> Result<ClaimAttempt, JobError> {
        let (locks, params) = (self.path("locks", id), self.path("params", id));
        // Together, since a server answers the calls of a session in their order. If one has to be repeated, the version of the
        // request tells whether it was read too early.
        let (lock, found, params) = tokio::join!(
            biased;
            HeldLock::try_take(session, &locks, LockMode::Exclusive),
            self.read(session, id),
            session.read_shards(&params),
        );
        let Some(lock) = lock? else {
            let waits = found?.is_some_and(|request| request.is_requested());
            return Ok(if waits { ClaimAttempt::Locked } else { ClaimAttempt::Settled });
        };
        crash_point("zookeeper-locked");
        let started = async { self.start(session, found?, params, worker_info).await };
        match started.await {
            Ok(Start::Started { request, params, job, places }) => {
                Ok(ClaimAttempt::Claimed(Box::new(ClaimedRequest { request, params, job, places, lock })))
            }
            Ok(Start::Waits) => {
                lock.release().await?;
                Ok(ClaimAttempt::Waits)
            }
            Ok(Start::Settled) => {
                let is_gone = session.stat(&self.path("requests", id)).await?.is_none();
                lock.release().await?;
                if is_gone {
                    // Its owner has removed the folder; taking the lock has made it again.
                    session.delete_tree(&self.path("locks", id)).await?;
                }
                Ok(ClaimAttempt::Settled)
            }
            Err(error) => {
                // The error says more than one of the release.
                lock.release().await.ok();
                Err(error)
            }
        }
    }

    async fn start(
        &self,
        session: &Session,
        found: Option<JobRequest>,
        params: Result<Option<Vec<u8>>, ShardError>,
        worker_info: Option<&Value>,
    ) -> Result<Start, JobError> {
        let Some(mut request) = found.filter(JobRequest::is_requested) else { return Ok(Start::Settled) };
        let mut params = match params {
            Ok(params) => params.ok_or_else(|| "its parameters are gone".to_owned()),
            Err(ShardError::Call(error)) => return Err(error.into()),
            Err(error) => Err(error.to_string()),
        };
        let (mut job, mut places) = (None, None);
        if let Some(info) = worker_info {
            self.put(&mut request, "worker_info", info)?;
            if let Some(path) = params.as_ref().ok().and_then(|params| job_ref(params)) {
                match session.frozen_job(&path).await? {
                    Ok(frozen) => job = Some(Box::new(frozen)),
                    Err(error) => params = Err(error),
                }
            }
            if let (Some(job), Ok(known)) = (&job, &params) {
                match Places::of_build(known, job) {
                    Ok(needed) => places = needed,
                    Err(error) => params = Err(error),
                }
            }
        }
        if let Some(places) = &places
            && !session.acquire_semaphores(places).await?
        {
            return Ok(Start::Waits);
        }
        let is_set = self.set_running(session, &mut request).await;
        if let (Ok(false) | Err(_), Some(places)) = (&is_set, &places) {
            session.release_semaphores(places).await?;
        }
        if !is_set? {
            return Ok(Start::Settled);
        }
        crash_point("zookeeper-running");
        Ok(Start::Started { request, params, job, places })
    }

    /// Sets a request to running and removes its parameters; never the latter alone, so that no request is without them.
    async fn set_running(&self, session: &Session, request: &mut JobRequest) -> Result<bool, JobError> {
        let params = self.path("params", &request.id);
        let shard = format!("{params}/{FIRST_SHARD}");
        let remove = [&shard, &params].map(|path| Write::Delete { path, version: None });
        if let Some(is_set) = self.write_state(session, request, RequestState::Running, &remove).await? {
            return Ok(is_set);
        }
        // They have several shards, or are gone.
        let is_set = self.set_state(session, request, RequestState::Running).await?;
        if is_set {
            session.retry(|| session.delete_tree(&params)).await?;
        }
        Ok(is_set)
    }

    /// Sets a request that this worker has locked to another state. `false` if it is gone or another process has changed it.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn set_state(
        &self,
        session: &Session,
        request: &mut JobRequest,
        state: RequestState,
    ) -> Result<bool, JobError> {
        Ok(self.write_state(session, request, state, &[]).await?.unwrap_or(false))
    }

    /// Sets the state with other writes in one transaction. `None` if nothing was written, since one of them cannot be done.
    async fn write_state(
        &self,
        session: &Session,
        request: &mut JobRequest,
        state: RequestState,
        others: &[Write<'_>],
    ) -> Result<Option<bool>, JobError> {
        self.put(request, "state", &state)?;
        let (path, data) = (self.path("requests", &request.id), self.to_bytes(&request.id, &request.json)?);
        loop {
            let write = Write::Set { path: &path, data: &data, version: Some(request.version) };
            let next = request.version.wrapping_add(1);
            let Err(failed) = session.multi(&[others, &[write]].concat()).await else {
                request.version = next;
                return Ok(Some(true));
            };
            match (failed.index, &failed.error.cause) {
                (None, _) if failed.error.is_unanswered() && !session.is_ended() => {
                    match session.retry(|| session.get(&path)).await? {
                        // The answer was lost, not the transaction.
                        Some((found, stat)) if found == data && stat.version == next => {
                            request.version = next;
                            return Ok(Some(true));
                        }
                        Some((_, stat)) if stat.version == request.version => {}
                        Some(_) | None => return Ok(Some(false)),
                    }
                }
                (Some(index), zk::Error::NoNode | zk::Error::BadVersion) if index == others.len() => {
                    return Ok(Some(false));
                }
                (Some(_), zk::Error::NoNode | zk::Error::NodeExists | zk::Error::NotEmpty) => return Ok(None),
                _ => return Err(failed.error.into()),
            }
        }
    }

    /// Completes a request whose submitter waits for its result: the result and the state in one transaction, if it is not large.
    /// `false` if the request is gone or another process has completed it.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn complete_with_result(
        &self,
        session: &Session,
        request: &mut JobRequest,
        result: &[u8],
    ) -> Result<bool, JobError> {
        let [data_path, path] = ["result-data", "results"].map(|folder| self.path(folder, &request.id));
        let (shard, data) = (format!("{data_path}/{FIRST_SHARD}"), shards::compress(&data_path, result)?);
        if data.len() <= ZOOKEEPER_EVENT_BYTES_MAX {
            let pointer = result_pointer(&data_path);
            let nodes = [(&data_path, &b""[..]), (&shard, &data), (&path, pointer.as_bytes())];
            let nodes = nodes.map(|(path, data)| Write::Create { path, data, mode: CreateMode::Persistent });
            if let Some(is_set) = self.write_state(session, request, RequestState::Completed, &nodes).await? {
                return Ok(is_set);
            }
        }
        // It is large, or a worker before this one has stored one.
        self.store_result(session, &request.id, result).await?;
        self.set_state(session, request, RequestState::Completed).await
    }

    /// Stores the result of a request whose submitter waits for it: first the data, then a pointer to them.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn store_result(&self, session: &Session, id: &str, result: &[u8]) -> Result<(), JobError> {
        let data_path = self.path("result-data", id);
        loop {
            match session.write_shards(&data_path, result).await {
                Err(ShardError::Call(error)) if error.is_unanswered() && !session.is_ended() => {}
                written => break written?,
            }
        }
        let pointer = result_pointer(&data_path);
        let path = self.path("results", id);
        let created = session.retry(|| session.create(&path, pointer.as_bytes(), CreateMode::Persistent));
        match created.await {
            Err(error) if error.cause != zk::Error::NodeExists => Err(error.into()),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Takes the lock of a request again whose session has expired. `None` if another process has had the request since, or has it;
    /// otherwise whether it is completed as this worker has written it last.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn reclaim(
        &self,
        session: &Arc<Session>,
        claimed: &mut ClaimedRequest,
    ) -> Result<Option<bool>, JobError> {
        let (old, locks) = (claimed.lock.path(), self.path("locks", &claimed.request.id));
        // A server that was away itself counts the old session anew.
        session.retry(|| session.delete(&old)).await?;
        let lock = HeldLock::try_take(session, &locks, LockMode::Exclusive).await?;
        let found = self.read(session, &claimed.request.id).await?;
        let request = &mut claimed.request;
        // A completion whose answer was lost with the session.
        let is_completed = found.as_ref().is_some_and(|found| {
            let is_same = self.to_bytes(&found.id, &found.json).ok() == self.to_bytes(&found.id, &request.json).ok();
            let is_next = found.version == request.version.wrapping_add(1);
            is_same && is_next && found.state() == Some(RequestState::Completed)
        });
        match (lock, found) {
            (Some(lock), Some(found)) if is_completed || found.version == request.version => {
                (claimed.lock, request.version) = (lock, found.version);
                Ok(Some(is_completed))
            }
            (lock, found) => {
                if let Some(lock) = lock {
                    lock.release().await?;
                }
                if found.is_none() {
                    // Taking the lock has made its folder again.
                    session.delete_tree(&locks).await?;
                }
                Ok(None)
            }
        }
    }

    /// Removes a completed request and the lock that this worker holds, as the worker of a merge does at its end.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn remove_held(&self, session: &Session, claimed: &ClaimedRequest) -> Result<(), Error> {
        let id = &claimed.request.id;
        let paths = [claimed.lock.path(), self.path("requests", id), self.path("locks", id)];
        let removed = session.multi(&paths.each_ref().map(|path| Write::Delete { path, version: None })).await;
        if removed.is_err() {
            // One of them is gone, or another process has entered the lock.
            session.retry(|| session.delete(&paths[0])).await?;
            self.remove(session, id).await?;
        }
        Ok(())
    }

    /// Removes a request with its parameters and its lock.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn remove(&self, session: &Session, id: &str) -> Result<(), Error> {
        for folder in ["requests", "params", "locks"] {
            let path = self.path(folder, id);
            session.retry(|| session.delete_tree(&path)).await?;
        }
        Ok(())
    }

    /// Puts a request back that was claimed and not started: its parameters first.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn put_back(&self, session: &Session, claimed: &mut ClaimedRequest) -> Result<(), JobError> {
        if let Ok(params) = &claimed.params {
            session.write_shards(&self.path("params", &claimed.request.id), params).await?;
        }
        // The lock goes with the state, so that a worker that is told of the request finds it free.
        let lock = claimed.lock.path();
        let unlock = Write::Delete { path: &lock, version: None };
        let request = &mut claimed.request;
        if self.write_state(session, request, RequestState::Requested, &[unlock]).await?.is_none() {
            self.set_state(session, request, RequestState::Requested).await?;
        }
        Ok(())
    }

    /// Completes a request: its event and its state in one transaction. `false` if the request is gone or another process has
    /// completed it.
    ///
    /// # Errors
    ///
    /// See [`JobError`].
    pub async fn complete_with_event(
        &self,
        session: &Session,
        request: &mut JobRequest,
        events: &EventQueue,
        event: Map<String, Value>,
    ) -> Result<bool, JobError> {
        let (path, data) = (events.event_prefix(), events.to_node(session, event).await?);
        let event = Write::Create { path: &path, data: &data, mode: CreateMode::PersistentSequential };
        if let Some(is_set) = self.write_state(session, request, RequestState::Completed, &[event]).await? {
            return Ok(is_set);
        }
        tracing::info!(request = request.id, "its pipeline is gone; completing it without an event");
        self.set_state(session, request, RequestState::Completed).await
    }

    fn put(&self, request: &mut JobRequest, key: &str, value: &impl Serialize) -> Result<(), JobError> {
        let set = request.json.set(key, value);
        set.map_err(|error| JobError::Unreadable {
            path: self.path("requests", &request.id),
            message: error.to_string(),
        })
    }

    fn to_bytes(&self, id: &str, json: &JsonObject) -> Result<Vec<u8>, JobError> {
        let written = json.to_bytes();
        written.map_err(|error| JobError::Unreadable { path: self.path("requests", id), message: error.to_string() })
    }
}

fn result_pointer(data_path: &str) -> String {
    serde_json::json!({ "result_data_path": data_path }).to_string()
}

/// The path of the job of a build.
fn job_ref(params: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Params {
        job_ref: Option<String>,
    }
    serde_json::from_slice::<Params>(params).ok()?.job_ref
}
