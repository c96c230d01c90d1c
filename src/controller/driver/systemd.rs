//! Workers as instances of a template unit, by `systemctl`: the service manager holds, logs and kills them.
//!
//! What one is told is in a file that its unit reads. That file says whose worker an instance is, too, so that pools may share
//! a template; where it is lost, the name of the instance says it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::program::{run, run_well};
use super::{Assignment, Driver, End, Found, Standing, Stop, Trouble};
use crate::controller::escape;
use crate::domain::group::Key;
use crate::limits::{DRIVER_LOOK_EVERY, UNIT_NAME_BYTES_MAX};

/// A template unit.
#[derive(Debug, Clone)]
pub struct Template {
    /// Its name without `@.service`.
    pub unit: String,
    /// What speaks to its service manager: `systemctl`, and what goes before its verbs.
    pub systemctl: Vec<String>,
}

/// The workers of one pool that a service manager runs.
pub(super) struct Systemd {
    template: Template,
    pool: String,
    folder: PathBuf,
    /// Instances that are being started: their files are there, and they need not be.
    starting: Mutex<BTreeSet<String>>,
}

/// Whose worker an instance is.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Record {
    id: String,
    key: String,
}

/// A unit, as `systemctl list-units` has it.
#[derive(Debug, Deserialize)]
struct Unit {
    unit: String,
    active: String,
}

impl Systemd {
    pub(super) const fn new(template: Template, pool: String, folder: PathBuf) -> Self {
        Self { template, pool, folder, starting: Mutex::new(BTreeSet::new()) }
    }

    fn instance(&self, id: &str, key: &Key) -> String {
        let room = UNIT_NAME_BYTES_MAX.saturating_sub(self.template.unit.len() + "@.service".len());
        escape::name(&[&self.pool, key.as_str(), id], room)
    }

    fn unit(&self, instance: &str) -> String {
        format!("{}@{instance}.service", self.template.unit)
    }

    fn systemctl(&self, arguments: &[&str]) -> Vec<String> {
        self.template.systemctl.iter().map(String::as_str).chain(arguments.iter().copied()).map(str::to_owned).collect()
    }

    fn starting(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was written down by whoever has started them; of those that are just being started nothing.
    fn records(&self) -> io::Result<BTreeMap<String, Record>> {
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

    /// Whose an instance is that nothing was written down of.
    fn by_name(&self, instance: &str) -> Option<Record> {
        let [pool, key, id] = <[String; 3]>::try_from(escape::parts(instance)?).ok()?;
        (pool == self.pool).then_some(Record { id, key })
    }

    /// What there is of one that is not active.
    async fn standing(&self, unit: &str) -> Standing {
        let ask = ["show", unit, "--property=Job,Result,ExecMainCode,ExecMainStatus"];
        let shown = run_well(&self.systemctl(&ask), b"").await.unwrap_or_default();
        let said: BTreeMap<&str, &str> = shown.lines().filter_map(|line| line.split_once('=')).collect();
        let of = |name| said.get(name).copied().unwrap_or_default();
        if !["", "0"].contains(&of("Job")) {
            // It is about to be started.
            return Standing::There;
        }
        let how = match (of("Result"), of("ExecMainCode"), of("ExecMainStatus")) {
            ("", ..) => "it has ended".to_owned(),
            // As `waitid` counts them: it exited, or was killed.
            (result, "1", status) => format!("exit status: {status} ({result})"),
            (result, "2" | "3", signal) => format!("signal: {signal} ({result})"),
            (result, ..) => result.to_owned(),
        };
        // A unit that is not active is told so by an exit status.
        let last = ["status", "--lines=20", "--output=cat", "--full", "--no-pager", unit];
        let said = run(&self.systemctl(&last), b"").await.map(|ran| ran.out).unwrap_or_default();
        // Its lines of the journal come after what is known of the unit.
        let last_words = said.split_once("\n\n").map_or("", |(_, lines)| lines).trim().to_owned();
        Standing::Ended(End { how, log: Some(format!("`journalctl --unit {unit}`")), last_words })
    }

    fn write(&self, instance: &str, assignment: &Assignment) -> io::Result<()> {
        let record = Record { id: assignment.id.clone(), key: assignment.key.as_str().to_owned() };
        let record = serde_json::to_vec(&record).map_err(io::Error::other)?;
        self.write_file(&format!("{instance}.json"), &record)?;
        self.write_file(&format!("{instance}.env"), environment_file(&assignment.variables).as_bytes())
    }

    /// Whoever reads it finds the whole of it. It is for nobody else.
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
                tracing::debug!(%error, path = %path.display(), "a file of a worker cannot be removed");
            }
        }
    }
}

/// An instance is being started for as long as it is there.
struct Starting<'a> {
    of: &'a Systemd,
    instance: &'a str,
}

impl<'a> Starting<'a> {
    fn of(of: &'a Systemd, instance: &'a str) -> Self {
        of.starting().insert(instance.to_owned());
        Self { of, instance }
    }
}

impl Drop for Starting<'_> {
    fn drop(&mut self) {
        self.of.starting().remove(self.instance);
    }
}

impl Driver for Systemd {
    const LOOK_EVERY: Duration = DRIVER_LOOK_EVERY;

    async fn list(&self) -> Result<Vec<Found>, Trouble> {
        let mut records = self.records()?;
        let pattern = self.unit("*");
        let listed = self.systemctl(&["list-units", "--all", "--full", "--no-pager", "--output=json", &pattern]);
        let said = run_well(&listed, b"").await?;
        let units: Vec<Unit> = serde_json::from_str(&said)
            .map_err(|error| Trouble(format!("what systemctl says is no list of units: {error}")))?;
        let mut found = Vec::new();
        let (start, end) = (format!("{}@", self.template.unit), ".service");
        for Unit { unit, active } in units {
            let Some(instance) = unit.strip_prefix(&start).and_then(|rest| rest.strip_suffix(end)) else { continue };
            let Some(record) = records.remove(instance).or_else(|| self.by_name(instance)) else { continue };
            let Some(key) = Key::new(&record.key) else { continue };
            let standing = match active.as_str() {
                "failed" | "inactive" => self.standing(&unit).await,
                "deactivating" => Standing::Going,
                _ => Standing::There,
            };
            found.push(Found { id: record.id, key, standing });
        }
        // A unit that has ended well is not kept by anybody.
        for (instance, Record { id, key }) in records {
            let Some(key) = Key::new(&key) else { continue };
            let log = Some(format!("`journalctl --unit {}`", self.unit(&instance)));
            let end = End { how: "it has ended, and its unit has not failed".to_owned(), log, ..End::default() };
            found.push(Found { id, key, standing: Standing::Ended(end) });
        }
        Ok(found)
    }

    async fn start(&self, assignment: Assignment) -> Result<(), Trouble> {
        let instance = self.instance(&assignment.id, &assignment.key);
        // Where it is not known what became of it, the next list finds its files and its unit, or its files alone.
        let _starting = Starting::of(self, &instance);
        self.write(&instance, &assignment)?;
        let started = run_well(&self.systemctl(&["start", "--no-block", &self.unit(&instance)]), b"").await;
        if started.is_err() {
            self.remove(&instance);
        }
        started.map(drop)
    }

    async fn stop(&self, id: String, key: Key, stop: Stop) -> Result<(), Trouble> {
        let instance = self.instance(&id, &key);
        let unit = self.unit(&instance);
        match stop {
            Stop::Ask => run_well(&self.systemctl(&["stop", "--no-block", &unit]), b"").await.map(drop),
            Stop::Force => run_well(&self.systemctl(&["kill", "--signal=SIGKILL", &unit]), b"").await.map(drop),
            Stop::Forget => {
                // It has nothing to forget where it did not fail.
                run(&self.systemctl(&["reset-failed", &unit]), b"").await?;
                self.remove(&instance);
                Ok(())
            }
        }
    }
}

/// Variables as `EnvironmentFile=` reads them.
fn environment_file(variables: &BTreeMap<String, String>) -> String {
    let mut file = String::new();
    for (name, value) in variables {
        let value: String =
            value.chars().flat_map(|c| "\"\\`$".contains(c).then_some('\\').into_iter().chain([c])).collect();
        // Writing to a string does not fail.
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
