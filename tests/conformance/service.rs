//! A real Taskcluster queue service; each case uses its own task queue.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use jiff::Timestamp;
use journeyman::source::Source;
use journeyman::source::taskcluster::{Api, ApiConfig, ArtifactStorage, Config, Credentials, Dialect, Taskcluster};
use journeyman::task::formats::new_task_id;
use journeyman_domain::id::{Run, TaskId};

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span, Spec, Waits};
use crate::support::task_queue::{content, definition, states};

/// The visibility timeout of the signed URLs of every Taskcluster.
const HIDDEN: Duration = Duration::from_secs(300);
/// Poll interval for an expired claim.
const LOOK: Duration = Duration::from_secs(2);

/// A service configured by the environment.
pub(crate) fn adapter() -> Adapter {
    let variable = |name: &str| std::env::var(format!("JOURNEYMAN_TEST_{name}")).ok().filter(|value| !value.is_empty());
    let all = (variable("ROOT_URL"), variable("CLIENT_ID"), variable("ACCESS_TOKEN"), variable("PROTOCOL"));
    let (Some(root_url), Some(client_id), Some(access_token), Some(protocol)) = all else {
        let why = "JOURNEYMAN_TEST_ROOT_URL, _CLIENT_ID, _ACCESS_TOKEN and _PROTOCOL name no service".into();
        return Adapter::Absent { name: "real service", why, needed: false };
    };
    let certificate = variable("CERTIFICATE").map(Into::into);
    let credentials =
        Credentials::new(&client_id, access_token.into(), certificate.as_ref()).expect("the credentials can sign");
    let dialect = match protocol.as_str() {
        "azure" => Dialect::Azure,
        "claim-work" => Dialect::ClaimWork,
        other => panic!("JOURNEYMAN_TEST_PROTOCOL is {other:?}; it should be azure or claim-work"),
    };
    let task_queue = variable("TASK_QUEUE");
    let rig = RealService { service: Service { root_url, credentials, dialect }, task_queue };
    Adapter::Present { rigs: vec![Box::new(rig)] }
}

struct RealService {
    service: Service,
    /// The only task queue that the credentials allow; cases then share it one after the other.
    task_queue: Option<String>,
}

impl Rig for RealService {
    fn name(&self) -> String {
        "real service".into()
    }

    fn can(&self, need: Need) -> bool {
        let azure = self.service.dialect == Dialect::Azure;
        match need {
            Need::Messages | Need::Redelivery => azure,
            Need::Waits | Need::Recovery => !azure,
            _ => need != Need::Garbage,
        }
    }

    fn waits(&self) -> Waits {
        match self.task_queue {
            Some(_) => Waits::InTurn,
            None => Waits::Together,
        }
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let task_queue = self.task_queue.clone().unwrap_or_else(fresh_task_queue);
        let bench = self.service.bench(task_queue, None);
        Box::pin(async move { Arc::new(bench) as Arc<dyn Bench> })
    }
}

#[derive(Clone)]
pub(crate) struct Service {
    pub(crate) root_url: String,
    pub(crate) credentials: Credentials,
    pub(crate) dialect: Dialect,
}

/// An unused task queue.
pub(crate) fn fresh_task_queue() -> String {
    let fresh = uuid::Uuid::new_v4().simple().to_string();
    format!("jm-test/t{}", &fresh[..16])
}

impl Service {
    fn api(&self) -> ApiConfig {
        ApiConfig::new(&self.root_url, Some(self.credentials.clone()))
    }

    pub(crate) fn bench(&self, task_queue: String, pass: Option<Pass>) -> ServiceBench {
        let api = Api::new(self.api()).expect("the address is good");
        ServiceBench { service: self.clone(), api, task_queue, created: Mutex::default(), pass }
    }
}

pub(crate) struct ServiceBench {
    service: Service,
    api: Api,
    task_queue: String,
    created: Mutex<Vec<TaskId>>,
    /// Lets time pass where it need not be waited for.
    pass: Option<Pass>,
}

pub(crate) type Pass = Box<dyn Fn(Span) -> Fut<'static, ()> + Send + Sync>;

impl ServiceBench {
    /// `takenUntil` of the claimed runs of this bench.
    async fn claimed_until(&self) -> Vec<Timestamp> {
        let tasks = self.created.lock().expect("no case has panicked").clone();
        let mut until = Vec::new();
        for task in &tasks {
            let status = self.api.task_status(task).await.expect("it is known");
            let runs = status["runs"].as_array().expect("it has runs").clone();
            let running = runs.into_iter().filter(|run| run["state"] == "running");
            until.extend(running.map(|run| {
                let text = run["takenUntil"].as_str().expect("a claim has an end");
                text.parse::<Timestamp>().expect("its end is a time")
            }));
        }
        until
    }
}

impl Bench for ServiceBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        let settings = Config {
            api: self.service.api(),
            dialect: self.service.dialect,
            task_queue: self.task_queue.clone(),
            worker_group: "conformance".into(),
            worker_id: worker.into(),
            artifact_storage: ArtifactStorage::S3,
        };
        Arc::new(Taskcluster::new(settings).expect("the settings are good"))
    }

    fn create(&self, spec: Spec) -> Fut<'_, TaskId> {
        Box::pin(async move {
            let task = new_task_id();
            let (provisioner, worker_type) = self.task_queue.split_once('/').expect("it has two parts");
            let mut definition = definition(&self.task_queue, &spec.payload);
            // A queue of 2019 knows no `taskQueueId`.
            definition.as_object_mut().expect("an object").remove("taskQueueId");
            let own = [("provisionerId", provisioner), ("workerType", worker_type), ("priority", spec.priority)];
            for (field, value) in own {
                definition[field] = value.into();
            }
            definition["retries"] = spec.retries.into();
            self.api.create_task(&task, definition).await.expect("it is created");
            self.created.lock().expect("no case has panicked").push(task.clone());
            task
        })
    }

    fn cancel<'a>(&'a self, task: &'a TaskId) -> Fut<'a, ()> {
        Box::pin(async {
            self.api.cancel_task(task).await.expect("it is canceled");
        })
    }

    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        Box::pin(async { states(&self.api.task_status(task).await.expect("it is known")) })
    }

    fn artifact<'a>(&'a self, run: &'a Run, name: &'a str) -> Fut<'a, Vec<u8>> {
        Box::pin(content(&self.api, run, name))
    }

    fn pass(&self, span: Span) -> Fut<'_, ()> {
        if let Some(pass) = &self.pass {
            return pass(span);
        }
        Box::pin(async move {
            let left =
                |until: &Timestamp| Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default();
            match span {
                Span::MostOfALease => {
                    let lease = self.claimed_until().await.iter().map(left).max().expect("something is claimed");
                    tokio::time::sleep(lease * 2 / 3).await;
                }
                // The case has its own timeout.
                Span::ALease => {
                    while let Some(lease) = self.claimed_until().await.iter().map(left).max() {
                        tokio::time::sleep(lease.max(LOOK)).await;
                    }
                }
                Span::AHiding => tokio::time::sleep(HIDDEN).await,
            }
        })
    }
}
