//! Workers that a site's own commands list, start and stop: one line of JSON in, lines of JSON out.

use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::program::run_well;
use super::{Assignment, Driver, End, Found, Standing, Stop, Trouble};
use crate::domain::group::Key;
use crate::limits::DRIVER_LOOK_EVERY;

/// A site's own commands: programs and their arguments.
#[derive(Debug, Clone)]
pub struct Commands {
    /// Says who is there.
    pub list: Vec<String>,
    /// Starts one.
    pub start: Vec<String>,
    /// Tells one to go.
    pub stop: Vec<String>,
}

/// The workers of one pool that these commands know of.
pub(super) struct Exec {
    pub(super) commands: Commands,
    pub(super) pool: String,
}

/// A worker, as the list of a site has it.
#[derive(Debug, Deserialize)]
struct Line {
    pool: String,
    id: String,
    key: String,
    #[serde(default)]
    going: bool,
    /// How it has ended, if it has.
    ended: Option<String>,
    log: Option<String>,
    #[serde(default)]
    last_words: String,
}

impl Exec {
    /// One that the list does not show would count as gone, so that all of it is understood or none.
    fn understood(&self, said: &str) -> Result<Vec<Found>, Trouble> {
        let lines = said.lines().filter(|line| !line.trim().is_empty()).enumerate();
        let read = lines.map(|(at, line)| {
            let odd = |what: &str| Trouble(format!("line {} of the list is no worker: {what}", at + 1));
            let Line { pool, id, key, going, ended, log, last_words } =
                serde_json::from_str(line).map_err(|error| odd(&error.to_string()))?;
            let key = Key::new(&key).ok_or_else(|| odd("its key is too long"))?;
            let standing = match ended {
                Some(how) => Standing::Ended(End { how, log, last_words }),
                None if going => Standing::Going,
                None => Standing::There,
            };
            Ok((pool == self.pool).then_some(Found { id, key, standing }))
        });
        read.filter_map(Result::transpose).collect()
    }
}

impl Driver for Exec {
    const LOOK_EVERY: Duration = DRIVER_LOOK_EVERY;

    async fn list(&self) -> Result<Vec<Found>, Trouble> {
        let order = json!({ "do": "list", "pool": self.pool });
        self.understood(&run_well(&self.commands.list, &line(&order)).await?)
    }

    async fn start(&self, assignment: Assignment) -> Result<(), Trouble> {
        let Assignment { id, key, variables } = assignment;
        let order = json!({ "do": "start", "pool": self.pool, "id": id, "key": key.as_str(), "variables": variables });
        run_well(&self.commands.start, &line(&order)).await.map(drop)
    }

    async fn stop(&self, id: String, key: Key, stop: Stop) -> Result<(), Trouble> {
        let how = match stop {
            Stop::Ask => "ask",
            Stop::Force => "force",
            Stop::Forget => "forget",
        };
        let order = json!({ "do": "stop", "pool": self.pool, "id": id, "key": key.as_str(), "how": how });
        run_well(&self.commands.stop, &line(&order)).await.map(drop)
    }
}

fn line(order: &serde_json::Value) -> Vec<u8> {
    format!("{order}\n").into_bytes()
}
