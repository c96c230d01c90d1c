//! Driver: workers as instances of a systemd template unit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::run_program::{run, run_checked};
use super::{Driver, DriverError, ListedWorker, StopMode, WorkerExit, WorkerSpec, WorkerState};
use crate::controller::name_encoding;
use crate::domain::group::Key;
use crate::limits::{DRIVER_POLL_INTERVAL, UNIT_NAME_BYTES_MAX};

#[derive(Debug, Clone)]
pub struct SystemdConfig {
    pub unit: String,
    /// The program and its leading arguments; tests use a stand-in.
    pub systemctl: Vec<String>,
}

pub(super) struct SystemdDriver {
    config: SystemdConfig,
    pool: String,
    folder: PathBuf,
    starting: Mutex<BTreeSet<String>>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct InstanceRecord {
    id: String,
    key: String,
}

#[derive(Debug, Deserialize)]
struct ListedUnit {
    unit: String,
    active: String,
}

impl SystemdDriver {
    pub(super) const fn new(config: SystemdConfig, pool: String, folder: PathBuf) -> Self {
        Self { config, pool, folder, starting: Mutex::new(BTreeSet::new()) }
    }

    fn instance_name(&self, id: &str, key: &Key) -> String {
        let room = UNIT_NAME_BYTES_MAX.saturating_sub(self.config.unit.len() + "@.service".len());
        name_encoding::object_name(&[&self.pool, key.as_str(), id], room)
    }

    fn unit_name(&self, instance: &str) -> String {
        format!("{}@{instance}.service", self.config.unit)
    }

    fn systemctl(&self, arguments: &[&str]) -> Vec<String> {
        self.config.systemctl.iter().map(String::as_str).chain(arguments.iter().copied()).map(str::to_owned).collect()
    }

    fn starting(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn records(&self) -> io::Result<BTreeMap<String, InstanceRecord>> {
        let starting = self.starting().clone();
        let mut records = BTreeMap::new();
        for entry in std::fs::read_dir(&self.folder)?.flatten() {
            let path = entry.path();
            let instance = path.file_stem().and_then(|name| name.to_str());
            let Some(instance) = instance.filter(|_| path.extension().is_some_and(|kind| kind == "json")) else {
                continue;
            };
            let record = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            if let Some(record) = record
                && !starting.contains(instance)
            {
                records.insert(instance.to_owned(), record);
            }
        }
        Ok(records)
    }

    fn parse_instance_name(&self, instance: &str) -> Option<InstanceRecord> {
        let [pool, key, id] = <[String; 3]>::try_from(name_encoding::parse_object_name(instance)?).ok()?;
        (pool == self.pool).then_some(InstanceRecord { id, key })
    }

    async fn inactive_state(&self, unit: &str) -> WorkerState {
        let ask = ["show", unit, "--property=Job,Result,ExecMainCode,ExecMainStatus"];
        let shown = run_checked(&self.systemctl(&ask), b"").await.unwrap_or_default();
        let said: BTreeMap<&str, &str> = shown.lines().filter_map(|line| line.split_once('=')).collect();
        let of = |name| said.get(name).copied().unwrap_or_default();
        if !["", "0"].contains(&of("Job")) {
            // A queued job means that it is about to start.
            return WorkerState::Running;
        }
        let how = match (of("Result"), of("ExecMainCode"), of("ExecMainStatus")) {
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
        let last_words = said.split_once("\n\n").map_or("", |(_, lines)| lines).trim().to_owned();
        WorkerState::Exited(WorkerExit {
            reason: how,
            log: Some(format!("`journalctl --unit {unit}`")),
            log_tail: last_words,
        })
    }

    fn write(&self, instance: &str, assignment: &WorkerSpec) -> io::Result<()> {
        let record = InstanceRecord { id: assignment.id.clone(), key: assignment.key.as_str().to_owned() };
        let record = serde_json::to_vec(&record).map_err(io::Error::other)?;
        self.write_file(&format!("{instance}.json"), &record)?;
        self.write_file(&format!("{instance}.env"), environment_file(&assignment.variables).as_bytes())
    }

    fn write_file(&self, name: &str, text: &[u8]) -> io::Result<()> {
        let fresh = self.folder.join(format!("{name}.new"));
        let mut options = std::fs::OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).open(&fresh)?.write_all(text)?;
        std::fs::rename(fresh, self.folder.join(name))
    }

    fn remove(&self, instance: &str) {
        for kind in ["env", "json"] {
            let path = self.folder.join(format!("{instance}.{kind}"));
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::debug!(%error, path = %path.display(), "cannot remove a file of a worker");
            }
        }
    }
}

struct StartGuard<'a> {
    driver: &'a SystemdDriver,
    instance: &'a str,
}

impl<'a> StartGuard<'a> {
    fn new(driver: &'a SystemdDriver, instance: &'a str) -> Self {
        driver.starting().insert(instance.to_owned());
        Self { driver, instance }
    }
}

impl Drop for StartGuard<'_> {
    fn drop(&mut self) {
        self.driver.starting().remove(self.instance);
    }
}

impl Driver for SystemdDriver {
    const LIST_INTERVAL: Duration = DRIVER_POLL_INTERVAL;

    async fn list(&self) -> Result<Vec<ListedWorker>, DriverError> {
        let mut records = self.records()?;
        let pattern = self.unit_name("*");
        let listed = self.systemctl(&["list-units", "--all", "--full", "--no-pager", "--output=json", &pattern]);
        let said = run_checked(&listed, b"").await?;
        let units: Vec<ListedUnit> = serde_json::from_str(&said)
            .map_err(|error| DriverError(format!("systemctl did not print a list of units: {error}")))?;
        let mut found = Vec::new();
        let (start, end) = (format!("{}@", self.config.unit), ".service");
        for ListedUnit { unit, active } in units {
            let Some(instance) = unit.strip_prefix(&start).and_then(|rest| rest.strip_suffix(end)) else { continue };
            let Some(record) = records.remove(instance).or_else(|| self.parse_instance_name(instance)) else {
                continue;
            };
            let Some(key) = Key::new(&record.key) else { continue };
            let standing = match active.as_str() {
                "failed" | "inactive" => self.inactive_state(&unit).await,
                "deactivating" => WorkerState::Stopping,
                _ => WorkerState::Running,
            };
            found.push(ListedWorker { id: record.id, key, state: standing });
        }
        // systemd unloads a unit that exited with success.
        for (instance, InstanceRecord { id, key }) in records {
            let Some(key) = Key::new(&key) else { continue };
            let log = Some(format!("`journalctl --unit {}`", self.unit_name(&instance)));
            let end = WorkerExit { reason: "exited with success".to_owned(), log, ..WorkerExit::default() };
            found.push(ListedWorker { id, key, state: WorkerState::Exited(end) });
        }
        Ok(found)
    }

    async fn start(&self, assignment: WorkerSpec) -> Result<(), DriverError> {
        let instance = self.instance_name(&assignment.id, &assignment.key);
        // If the call fails midway, the next list finds the files and the unit, or the files alone.
        let _starting = StartGuard::new(self, &instance);
        self.write(&instance, &assignment)?;
        let started = run_checked(&self.systemctl(&["start", "--no-block", &self.unit_name(&instance)]), b"").await;
        if started.is_err() {
            self.remove(&instance);
        }
        started.map(drop)
    }

    async fn stop(&self, id: String, key: Key, stop: StopMode) -> Result<(), DriverError> {
        let instance = self.instance_name(&id, &key);
        let unit = self.unit_name(&instance);
        match stop {
            StopMode::Terminate => run_checked(&self.systemctl(&["stop", "--no-block", &unit]), b"").await.map(drop),
            StopMode::Kill => run_checked(&self.systemctl(&["kill", "--signal=SIGKILL", &unit]), b"").await.map(drop),
            StopMode::Remove => {
                // Fails for a unit that did not fail.
                run(&self.systemctl(&["reset-failed", &unit]), b"").await?;
                self.remove(&instance);
                Ok(())
            }
        }
    }
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
