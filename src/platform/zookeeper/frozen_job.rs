//! The job of a build as its scheduler has frozen it: its playbooks, variables, timeouts and semaphores, which the parameters of
//! the build leave out.

use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::semaphore::Semaphore;
use super::shards::{ShardError, decompress};
use super::{Error, Session};
use journeyman_domain::limits::ZUUL_POST_TIMEOUT_MAX;

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
    /// How long a build may take: its timeout, which ends before the last playbooks, and a timeout for each of these.
    pub fn run_time_max(&self) -> Option<Duration> {
        let seconds = |key| self.json.get(key).and_then(Value::as_f64).filter(|seconds| *seconds > 0.0);
        let timeout = |key| Duration::try_from_secs_f64(seconds(key)?).ok();
        let last = ["post_run", "cleanup_run"].into_iter().filter_map(|key| self.json.get(key)?.as_array());
        let last = u32::try_from(last.map(Vec::len).sum::<usize>()).unwrap_or(u32::MAX);
        let each = timeout("post_timeout").unwrap_or(ZUUL_POST_TIMEOUT_MAX);
        Some(timeout("timeout")?.saturating_add(each.saturating_mul(last)))
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn d3_the_playbooks_after_the_run_have_a_time_of_their_own() {
        let fixture = include_str!("../../../fixtures/zookeeper/frozen-job.json");
        for (change, seconds) in [
            (json!({}), Some(120)),
            (json!({ "post_run": [{}, {}], "post_timeout": 30 }), Some(120 + 2 * 30)),
            (json!({ "post_run": [{}], "cleanup_run": [{}], "post_timeout": null }), Some(120 + 2 * 10_800)),
            (json!({ "post_run": [{}], "post_timeout": 30, "timeout": null }), None),
        ] {
            let mut job: Map<String, Value> = serde_json::from_str(fixture).expect("it is JSON");
            job.extend(change.as_object().expect("an object").clone());
            let job = FrozenJob::new(&job.into()).expect("it can be read");
            assert_eq!(job.run_time_max(), seconds.map(Duration::from_secs), "{change}");
        }
    }
}
