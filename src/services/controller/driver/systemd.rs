//! Driver: workers as instances of a systemd template unit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

use super::object_name::object_name;
use super::run_program::{ProgramOutput, run, run_checked};
use super::{Driver, DriverError, ListedWorker, StartError, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::controller::config::SystemdDriverConfig;
use crate::controller::state_store::{StateStore, WorkerRecord};
use journeyman_domain::group::Key;
use journeyman_domain::limits::UNIT_NAME_BYTES_MAX;
use journeyman_platform::host::work_dir::ignore_missing;

pub(super) struct SystemdDriver {
    pub(super) config: SystemdDriverConfig,
    pub(super) pool: String,
    pub(super) folder: PathBuf,
    pub(super) store: Arc<StateStore>,
}

/// Exit statuses of systemctl, as of init scripts (LSB).
const NO_SUCH_UNIT: i32 = 5;
const UNIT_NOT_LOADED: i32 = 6;

#[derive(Debug, Deserialize)]
struct ListedUnit {
    unit: String,
    active: String,
}

impl SystemdDriver {
    fn instance_name(&self, id: &str, key: &Key) -> String {
        let room = UNIT_NAME_BYTES_MAX.saturating_sub(self.config.unit.len() + "@.service".len());
        object_name(&[&self.pool, key.as_str(), id], room)
    }

    fn unit_name(&self, instance: &str) -> String {
        format!("{}@{instance}.service", self.config.unit)
    }

    fn systemctl(&self, arguments: &[&str]) -> Vec<String> {
        self.config.systemctl.iter().map(String::as_str).chain(arguments.iter().copied()).map(str::to_owned).collect()
    }

    async fn call(&self, arguments: &[&str]) -> Result<String, DriverError> {
        run_checked(&self.systemctl(arguments), b"", ProgramOutput::first_error).await
    }

    /// The records by the names of their instances.
    async fn records(&self) -> io::Result<BTreeMap<String, (WorkerRecord, Key)>> {
        let records = self.store.run(StateStore::workers).await?.into_iter().filter_map(|record| {
            let key = Key::new(&record.key)?;
            Some((self.instance_name(&record.id, &key), (record, key)))
        });
        Ok(records.collect())
    }

    async fn inactive_state(&self, unit: &str) -> WorkerState {
        let ask = ["show", unit, "--property=Job,Result,ExecMainCode,ExecMainStatus"];
        let shown = self.call(&ask).await.unwrap_or_default();
        let said: BTreeMap<&str, &str> = shown.lines().filter_map(|line| line.split_once('=')).collect();
        let of = |name| said.get(name).copied().unwrap_or_default();
        if !["", "0"].contains(&of("Job")) {
            // A queued job means that it is about to start.
            return WorkerState::Running;
        }
        let reason = match (of("Result"), of("ExecMainCode"), of("ExecMainStatus")) {
            ("", ..) => "exited".to_owned(),
            // ExecMainCode has the values of waitid(2): 1 exited, 2 killed, 3 dumped.
            (result, "1", status) => format!("exit status: {status} ({result})"),
            (result, "2" | "3", signal) => format!("signal: {signal} ({result})"),
            (result, ..) => result.to_owned(),
        };
        // `systemctl status` fails for an inactive unit.
        let last = ["status", "--lines=20", "--output=cat", "--full", "--no-pager", unit];
        let said = run(&self.systemctl(&last), b"").await.map(|ran| ran.stdout).unwrap_or_default();
        // The journal lines follow the first empty line.
        let log_tail = said.split_once("\n\n").map_or("", |(_, lines)| lines).trim().to_owned();
        WorkerState::Exited(WorkerExit { reason, log: Some(format!("`journalctl --unit {unit}`")), log_tail })
    }

    fn environment_path(&self, instance: &str) -> PathBuf {
        self.folder.join(format!("{instance}.env"))
    }

    async fn remove(&self, id: &str, instance: &str) -> io::Result<()> {
        let (id, environment) = (id.to_owned(), self.environment_path(instance));
        let remove = move |store: &StateStore| {
            std::fs::remove_file(environment).or_else(ignore_missing)?;
            store.remove_worker(&id)
        };
        self.store.run(remove).await
    }
}

impl Driver for SystemdDriver {
    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let mut records = self.records().await?;
        let pattern = self.unit_name("*");
        let said = self.call(&["list-units", "--all", "--full", "--no-pager", "--output=json", &pattern]).await?;
        let units: Vec<ListedUnit> = serde_json::from_slice(said.as_bytes())
            .map_err(|error| DriverError(format!("systemctl did not print a list of units: {error}")))?;
        let mut found = Vec::new();
        let (start, end) = (format!("{}@", self.config.unit), ".service");
        for ListedUnit { unit, active } in units {
            let Some(instance) = unit.strip_prefix(&start).and_then(|rest| rest.strip_suffix(end)) else { continue };
            let Some((record, key)) = records.remove(instance) else { continue };
            let state = match active.as_str() {
                "failed" | "inactive" => self.inactive_state(&unit).await,
                "deactivating" => WorkerState::Stopping,
                _ => WorkerState::Running,
            };
            found.push(ListedWorker { id: record.id, key, state, detail: None });
        }
        for (instance, (record, key)) in records {
            // systemd unloads a unit that exited with success.
            let log = Some(format!("`journalctl --unit {}`", self.unit_name(&instance)));
            let exit = WorkerExit { reason: "exited with success".to_owned(), log, ..WorkerExit::default() };
            found.push(ListedWorker { id: record.id, key, state: WorkerState::Exited(exit), detail: None });
        }
        Ok(found)
    }

    async fn start(&self, spec: WorkerSpec) -> Result<(), StartError> {
        let WorkerSpec { id, key, variables } = spec;
        let instance = self.instance_name(&id, &key);
        let record = WorkerRecord::new(&id, &key, None);
        self.store.run(move |store| store.put_worker(&record)).await?;
        let environment = self.environment_path(&instance);
        let start = async {
            self.store.run(move |_| write_environment(&environment, &variables)).await?;
            let ran = run(&self.systemctl(&["start", "--no-block", &self.unit_name(&instance)]), b"").await?;
            match ran.status.code() {
                Some(0) => Ok(()),
                Some(NO_SUCH_UNIT | UNIT_NOT_LOADED) => Err(StartError::Worker(ran.first_error())),
                Some(_) | None => Err(DriverError(ran.first_error()).into()),
            }
        };
        let started = start.await;
        if started.is_err() {
            self.remove(&id, &instance).await?;
        }
        started
    }

    async fn stop(&self, id: String, key: Key, stop: StopMode) -> Result<(), DriverError> {
        let instance = self.instance_name(&id, &key);
        let unit = self.unit_name(&instance);
        match stop {
            StopMode::Terminate => self.call(&["stop", "--no-block", &unit]).await.map(drop),
            StopMode::Kill => self.call(&["kill", "--signal=SIGKILL", &unit]).await.map(drop),
            StopMode::Remove => {
                // Fails for a unit that did not fail.
                run(&self.systemctl(&["reset-failed", &unit]), b"").await?;
                Ok(self.remove(&id, &instance).await?)
            }
        }
    }
}

/// Contains the password of the broker, so only its owner may read it.
fn write_environment(path: &Path, variables: &BTreeMap<String, String>) -> io::Result<()> {
    let new = path.with_extension("env.new");
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(environment_file(variables).as_bytes())?;
    std::fs::rename(new, path)
}

fn environment_file(variables: &BTreeMap<String, String>) -> String {
    let mut file = String::new();
    for (name, value) in variables {
        let value: String =
            value.chars().flat_map(|c| "\"\\`$".contains(c).then_some('\\').into_iter().chain([c])).collect();
        // Writing to a String cannot fail.
        writeln!(file, "{name}=\"{value}\"").ok();
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_may_hold_what_it_likes() {
        let variables = [("A", "a b=c"), ("B", "\"$HOME\" `x` \\n\nnext"), ("C", "")];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let file = "A=\"a b=c\"\nB=\"\\\"\\$HOME\\\" \\`x\\` \\\\n\nnext\"\nC=\"\"\n";
        assert_eq!(environment_file(&variables), file);
    }
}
