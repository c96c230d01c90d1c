//! Workers as pods of a cluster: a Deployment for each key.
//!
//! How many pods one has is decided here, or by KEDA. Here each pod is a worker, and is called as its pod is; since a cluster
//! makes pods in its own time, a worker that was started is a promise of the Deployment until its pod is there. With KEDA the
//! whole Deployment is one worker: it is made when the group is needed, and removed when it is not.

mod api;
mod objects;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Mutex;

use super::{Assignment, Driver, End, Found, Names, Standing, Stop, Trouble};
use crate::domain::group::Key;
use crate::limits::DRIVER_LOOK_EVERY;
use api::{Answer, Api, DEPLOYMENTS, PODS, SCALED_OBJECTS, SECRETS, TRIGGER_AUTHENTICATIONS};
use objects::{Group, POOL, group, group_of, key_of, label, name_of, worker_of};

/// Where pods are, and what they are made of.
#[derive(Debug, Clone)]
pub struct Cluster {
    /// The address of the API.
    pub server: String,
    /// The namespace of everything that is made.
    pub namespace: String,
    /// Where the token is that it is asked with.
    pub token_file: Option<PathBuf>,
    /// Who vouches for the server (PEM); this system's choice where it is not said.
    pub ca_file: Option<PathBuf>,
    /// The image of a worker.
    pub image: String,
    /// What is run in it; what the image says where this is empty.
    pub command: Vec<String>,
    /// Whose rights workers have.
    pub service_account: Option<String>,
    /// What the site says of pods besides: a pod template, of which names, labels and variables are ours.
    pub template: Option<Value>,
    /// Who decides how many pods a group has.
    pub scaling: Scaling,
}

/// Who decides how many pods a group has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaling {
    /// This controller.
    Own,
    /// KEDA, by the length of the queue.
    Keda {
        /// So many at least.
        least: u32,
        /// So many at most.
        most: u32,
        /// How many requests one is for.
        per_worker: u32,
    },
}

/// Makes the next worker the one that goes where a Deployment gets fewer.
const DELETION_COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// The workers of one pool in a cluster.
pub(super) struct Kubernetes {
    cluster: Cluster,
    pool: String,
    grace: Duration,
    api: Api,
    /// Held while a group is changed: what is written depends on what was read.
    changes: Mutex<()>,
}

impl Kubernetes {
    pub(super) fn new(cluster: Cluster, pool: String, grace: Duration) -> Result<Self, Trouble> {
        let api = Api::new(&cluster)?;
        Ok(Self { cluster, pool, grace, api, changes: Mutex::new(()) })
    }

    /// Those whose number is decided here: pods, and what is promised of them. Pods are asked for first: where one is told to go
    /// meanwhile, it is counted and not promised, and not the other way round.
    async fn pods(&self) -> Result<Vec<Found>, Trouble> {
        let (mut found, mut live) = (Vec::new(), BTreeMap::<String, u64>::new());
        for pod in self.api.list(PODS, POOL, &label(&self.pool)).await? {
            let (Some(key), Some(name)) = (key_of(&pod, &self.pool), name_of(&pod)) else { continue };
            let goes = !pod["metadata"]["deletionTimestamp"].is_null();
            let standing = match pod["status"]["phase"].as_str() {
                _ if goes => Standing::Going,
                Some("Failed" | "Succeeded") => Standing::Ended(self.end(name, &pod).await),
                Some(_) | None => Standing::There,
            };
            if standing == Standing::There
                && let Some(group) = group_of(&pod)
            {
                *live.entry(group.to_owned()).or_default() += 1;
            }
            found.push(Found { id: name.to_owned(), key, standing });
        }
        for deployment in self.deployments().await? {
            let (Some(key), Some(name)) = (key_of(&deployment, &self.pool), name_of(&deployment)) else { continue };
            let there = live.get(name).copied().unwrap_or_default();
            for number in there..replicas(&deployment) {
                let id = format!("{name}{PROMISE}{number}");
                found.push(Found { id, key: key.clone(), standing: Standing::Promised });
            }
        }
        Ok(found)
    }

    async fn deployments(&self) -> Result<Vec<Value>, Trouble> {
        self.api.list(DEPLOYMENTS, POOL, &label(&self.pool)).await
    }

    async fn end(&self, name: &str, pod: &Value) -> End {
        let state = &pod["status"]["containerStatuses"][0]["state"]["terminated"];
        let reason = [&state["reason"], &pod["status"]["reason"]].into_iter().find_map(Value::as_str);
        let how = match (state["exitCode"].as_i64(), reason) {
            (Some(code), Some(reason)) => format!("exit status: {code} ({reason})"),
            (Some(code), None) => format!("exit status: {code}"),
            (None, reason) => reason.unwrap_or("its pod has ended").to_owned(),
        };
        End { how, log: None, last_words: self.api.last_words(name).await }
    }

    /// Makes a group: first what its pods are told, so that none waits for that.
    async fn make(&self, new: &Group<'_>) -> Result<(), Trouble> {
        done(self.api.create(SECRETS, &new.secret()).await?, "its secret")?;
        let made = match self.api.create(DEPLOYMENTS, &new.deployment()).await {
            Ok(answer) => done(answer, "its Deployment"),
            Err(why) => Err(why),
        };
        let deployment = match made {
            Ok(deployment) => deployment,
            Err(why) => {
                // What cannot be removed is in nobody's way.
                self.api.delete(SECRETS, &new.secret_name(), &json!({})).await.ok();
                return Err(why);
            }
        };
        // The rest goes when the Deployment does.
        let owner = json!({ "metadata": { "ownerReferences": [{
            "apiVersion": "apps/v1", "kind": "Deployment", "name": new.name(), "uid": deployment["metadata"]["uid"],
        }] } });
        self.api.patch(SECRETS, &new.secret_name(), &owner).await?;
        if let Scaling::Keda { least, most, per_worker } = self.cluster.scaling {
            let objects = [
                (TRIGGER_AUTHENTICATIONS, new.trigger_authentication()),
                (SCALED_OBJECTS, new.scaled_object(least, most, per_worker)),
            ];
            for (kind, mut object) in objects {
                object["metadata"]["ownerReferences"] = owner["metadata"]["ownerReferences"].clone();
                if let Err(why) = self.make_owned(kind, &object).await {
                    self.remove(&new.name()).await.ok();
                    return Err(why);
                }
            }
        }
        Ok(())
    }

    /// One of an earlier making may still be there: it is removed with its own Deployment, and this is tried again.
    async fn make_owned(&self, kind: api::Kind, object: &Value) -> Result<(), Trouble> {
        done(self.api.create(kind, object).await?, "an object of KEDA").map(drop)
    }

    async fn remove(&self, group: &str) -> Result<(), Trouble> {
        self.api.delete(DEPLOYMENTS, group, &json!({ "propagationPolicy": "Background" })).await
    }

    /// Changes the number of pods of a group.
    async fn resize(&self, deployment: &Value, replicas: u64) -> Result<(), Trouble> {
        let Some(name) = name_of(deployment) else { return Ok(()) };
        let version = &deployment["metadata"]["resourceVersion"];
        let change = json!({ "metadata": { "resourceVersion": version }, "spec": { "replicas": replicas } });
        done(self.api.patch(DEPLOYMENTS, name, &change).await?, "its Deployment").map(drop)
    }

    /// Takes one pod away: this one, where the cluster does as it is told.
    async fn shrink(&self, id: &str, key: &Key) -> Result<(), Trouble> {
        let _one = self.changes.lock().await;
        let group = group(&self.pool, key);
        let Some(deployment) = self.api.get(DEPLOYMENTS, &group).await? else { return Ok(()) };
        let replicas = replicas(&deployment);
        if replicas <= 1 {
            return self.remove(&group).await;
        }
        if !id.contains(PROMISE) {
            let first = json!({ "metadata": { "annotations": { DELETION_COST: "-1000" } } });
            self.api.patch(PODS, id, &first).await?;
        }
        self.resize(&deployment, replicas - 1).await
    }
}

/// Between the name of a Deployment and the number of a pod that it has promised. No pod has it in its name.
const PROMISE: char = '~';

fn replicas(deployment: &Value) -> u64 {
    deployment["spec"]["replicas"].as_u64().unwrap_or_default()
}

fn done(answer: Answer, what: &str) -> Result<Value, Trouble> {
    match answer {
        Answer::Done(object) => Ok(object),
        Answer::Missing => Err(Trouble(format!("{what} is not known to the cluster"))),
        Answer::Conflict => Err(Trouble(format!("{what} is there already, or was just changed"))),
    }
}

impl Driver for Kubernetes {
    const LOOK_EVERY: Duration = DRIVER_LOOK_EVERY;

    fn names(&self) -> Names {
        match self.cluster.scaling {
            Scaling::Own => Names::Theirs,
            Scaling::Keda { .. } => Names::Ours,
        }
    }

    async fn list(&self) -> Result<Vec<Found>, Trouble> {
        match self.cluster.scaling {
            Scaling::Own => self.pods().await,
            Scaling::Keda { .. } => {
                let deployments = self.deployments().await?;
                let found = deployments.iter().filter_map(|deployment| {
                    let (id, key) = (worker_of(deployment)?.to_owned(), key_of(deployment, &self.pool)?);
                    Some(Found { id, key, standing: Standing::There })
                });
                Ok(found.collect())
            }
        }
    }

    async fn start(&self, assignment: Assignment) -> Result<(), Trouble> {
        let _one = self.changes.lock().await;
        let (cluster, pool) = (&self.cluster, self.pool.as_str());
        let new = Group { cluster, pool, grace_seconds: self.grace.as_secs(), assignment: &assignment };
        match (self.api.get(DEPLOYMENTS, &new.name()).await?, cluster.scaling) {
            (None, _) => self.make(&new).await,
            (Some(deployment), Scaling::Own) => self.resize(&deployment, replicas(&deployment) + 1).await,
            (Some(_), Scaling::Keda { .. }) => Err(Trouble("the group is there already".to_owned())),
        }
    }

    async fn stop(&self, id: String, key: Key, stop: Stop) -> Result<(), Trouble> {
        match (stop, self.cluster.scaling) {
            (Stop::Ask, Scaling::Own) => self.shrink(&id, &key).await,
            (Stop::Force, Scaling::Own) if id.contains(PROMISE) => Ok(()),
            (Stop::Force, Scaling::Own) => self.api.delete(PODS, &id, &json!({ "gracePeriodSeconds": 0 })).await,
            (Stop::Forget, Scaling::Own) => self.api.delete(PODS, &id, &json!({})).await,
            (Stop::Ask | Stop::Force | Stop::Forget, Scaling::Keda { .. }) => {
                let _one = self.changes.lock().await;
                self.remove(&group(&self.pool, &key)).await
            }
        }
    }
}
