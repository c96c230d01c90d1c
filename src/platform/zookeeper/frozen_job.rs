//! The job of a build as its scheduler has frozen it: its playbooks, variables, timeouts and semaphores, which the parameters of
//! the build leave out.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::semaphore::Semaphore;
use super::shards::{ShardError, decompress};
use super::{Error, Session};

/// What a handler gets of a frozen job.
const PLAYBOOKS: [&str; 4] = ["pre_run", "run", "post_run", "cleanup_run"];
const VARIABLES: [&str; 4] = ["variables", "extra_variables", "group_variables", "host_variables"];
const OTHERS: [&str; 4] = ["name", "pre_timeout", "timeout", "post_timeout"];

/// A frozen job.
#[derive(Debug, Clone)]
pub struct FrozenJob {
    /// Its name, timeouts, playbooks and variables.
    pub json: Map<String, Value>,
    /// What its playbooks need, each once.
    pub semaphores: Vec<Semaphore>,
}

impl FrozenJob {
    /// How many seconds a build may take: the timeout of all but the last playbooks, and that of each of these.
    pub fn seconds_max(&self) -> Option<f64> {
        let seconds = |key| self.json.get(key).and_then(Value::as_f64);
        let last = self.json.get("post_run").and_then(Value::as_array).map_or(0, Vec::len);
        let last = u32::try_from(last).unwrap_or(u32::MAX);
        Some(seconds("timeout")? + f64::from(last) * seconds("post_timeout").unwrap_or(0.0))
    }

    fn new(all: &Value) -> Result<Self, String> {
        #[derive(Deserialize)]
        struct Playbook {
            #[serde(default)]
            semaphores: Vec<Semaphore>,
        }
        let mut semaphores = Vec::new();
        for key in PLAYBOOKS {
            let playbooks = all.get(key).unwrap_or(&Value::Null);
            // serde's message may quote the job.
            let playbooks = Option::<Vec<Playbook>>::deserialize(playbooks).map_err(|_| format!("{key} is odd"))?;
            semaphores.extend(playbooks.into_iter().flatten().flat_map(|playbook| playbook.semaphores));
        }
        semaphores.sort_by(|one, other| one.path.cmp(&other.path));
        semaphores.dedup_by(|one, other| one.path == other.path);
        let kept = PLAYBOOKS.into_iter().chain(OTHERS).filter_map(|key| Some((key.to_owned(), all.get(key)?.clone())));
        Ok(Self { json: kept.collect(), semaphores })
    }
}

impl Session {
    /// Reads a frozen job; the inner error says what is wrong with it, without its content.
    ///
    /// # Errors
    ///
    /// See [`Error`].
    pub async fn frozen_job(&self, path: &str) -> Result<Result<FrozenJob, String>, Error> {
        let odd = |what: &str| Ok(Err(format!("its frozen job {path} cannot be read: {what}")));
        let Some((data, _)) = self.retry(|| self.get(path)).await? else { return odd("the node is gone") };
        let Some(all) = json(decompress(path, &[data])) else { return odd("it is no compressed JSON") };
        let mut job = match FrozenJob::new(&all) {
            Ok(job) => job,
            Err(why) => return odd(&why),
        };
        for key in VARIABLES {
            let Some(stored) = all.get(key) else { continue };
            // Long ones are beside the job.
            let value = if let Some(beside) = stored["path"].as_str() {
                let data = match self.read_shards(beside).await {
                    Err(ShardError::Call(error)) => return Err(error),
                    read => json(read.map(Option::unwrap_or_default)),
                };
                let Some(mut data) = data else { return odd(&format!("{key} are gone")) };
                data["data"].take()
            } else {
                stored["data"].clone()
            };
            job.json.insert(key.to_owned(), value);
        }
        Ok(Ok(job))
    }
}

fn json(data: Result<Vec<u8>, ShardError>) -> Option<Value> {
    serde_json::from_slice(&data.ok()?).ok()
}
