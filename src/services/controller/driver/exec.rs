//! Driver: workers that a site's own program lists, starts and stops, by JSON lines.

use serde::Deserialize;
use serde_json::json;

use super::run_program::{ProgramOutput, run, run_checked};
use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use journeyman_domain::group::Key;

pub(super) struct ExecDriver {
    pub(super) program: Vec<String>,
    pub(super) pool: String,
}

#[derive(Debug, Deserialize)]
struct ExecListEntry {
    pool: String,
    id: String,
    key: String,
    #[serde(default)]
    stopping: bool,
    exit: Option<String>,
    log: Option<String>,
    #[serde(default)]
    log_tail: String,
}

impl ExecDriver {
    fn parse_list(&self, said: &str) -> Result<Vec<ListedWorker>, DriverError> {
        let lines = said.lines().filter(|line| !line.trim().is_empty()).enumerate();
        let read = lines.map(|(at, line)| {
            let odd = |what: &str| DriverError(format!("line {} of the list is not a worker: {what}", at + 1));
            let ExecListEntry { pool, id, key, stopping, exit, log, log_tail } =
                serde_json::from_slice(line.as_bytes()).map_err(|error| odd(&error.to_string()))?;
            let key = Key::new(&key).ok_or_else(|| odd("the key is too long"))?;
            let standing = match exit {
                Some(how) => WorkerState::Exited(WorkerExit { reason: how, log, log_tail }),
                None if stopping => WorkerState::Stopping,
                None => WorkerState::Running,
            };
            Ok((pool == self.pool).then_some(ListedWorker { id, key, state: standing, detail: None }))
        });
        read.filter_map(Result::transpose).collect()
    }
}

impl Driver for ExecDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let order = json!({ "action": "list", "pool": self.pool });
        self.parse_list(&run_checked(&self.program, &json_line(&order), ProgramOutput::last_error).await?)
    }

    async fn start(&self, assignment: WorkerSpec) -> Result<(), StartError> {
        let WorkerSpec { id, key, variables } = assignment;
        let order =
            json!({ "action": "start", "pool": self.pool, "id": id, "key": key.as_str(), "variables": variables });
        let ran = run(&self.program, &json_line(&order)).await?;
        if ran.status.success() { Ok(()) } else { Err(StartError::Worker(ran.last_error())) }
    }

    async fn stop(&self, id: String, key: Key, stop: StopMode) -> Result<(), DriverError> {
        let mode = match stop {
            StopMode::Terminate => "terminate",
            StopMode::Kill => "kill",
            StopMode::Remove => "remove",
        };
        let order = json!({ "action": "stop", "pool": self.pool, "id": id, "key": key.as_str(), "mode": mode });
        run_checked(&self.program, &json_line(&order), ProgramOutput::last_error).await.map(drop)
    }
}

fn json_line(order: &serde_json::Value) -> Vec<u8> {
    format!("{order}\n").into_bytes()
}
