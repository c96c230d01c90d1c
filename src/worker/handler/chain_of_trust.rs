//! The chain of trust: a signed list of a task's artifacts and their digests, in the format of generic-worker.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::signature::Ed25519KeyPair;
use serde_json::{Map, Value, json};

use crate::task::Deployment;

use super::TaskInfo;

/// The list.
pub(crate) const LIST_NAME: &str = "public/chain-of-trust.json";
/// Its signature: 64 bytes.
pub(crate) const SIGNATURE_NAME: &str = "public/chain-of-trust.json.sig";
/// The log as it is in the list: that of the task may have lines about the upload.
pub(crate) const LOG_NAME: &str = "public/logs/certified.log";
pub(super) const NAMES: [&str; 3] = [LIST_NAME, SIGNATURE_NAME, LOG_NAME];

/// The key that signs. Clones share it.
#[derive(Debug, Clone)]
pub struct SigningKey(Arc<Ed25519KeyPair>);

impl SigningKey {
    /// Reads a key as generic-worker and scriptworker write it: a seed of 32 bytes in base64.
    ///
    /// # Errors
    ///
    /// The text is no such seed; it is not quoted.
    pub fn parse(text: &str) -> Result<Self, String> {
        let seed = STANDARD.decode(text.trim()).map_err(|_| "the key is not base64".to_owned())?;
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed);
        Ok(Self(Arc::new(pair.map_err(|_| "the key is not a seed of 32 bytes".to_owned())?)))
    }

    pub(crate) fn sign(&self, list: &[u8]) -> Vec<u8> {
        self.0.sign(list).as_ref().to_vec()
    }
}

/// The list of these artifacts, by name, with their SHA-256 in hexadecimal digits.
pub(crate) fn list(task: &TaskInfo, deployment: &dyn Deployment, digests: &BTreeMap<String, String>) -> Vec<u8> {
    let artifacts: Map<String, Value> =
        digests.iter().map(|(name, digest)| (name.clone(), json!({ "sha256": digest }))).collect();
    let (group, id) = deployment.worker();
    let list = json!({
        "chainOfTrustVersion": 1,
        "artifacts": artifacts,
        "task": task.definition.json(),
        "taskId": task.run.task.as_str(),
        "runId": task.run.run,
        "workerGroup": group,
        "workerId": id,
        "environment": {},
    });
    format!("{list:#}").into_bytes()
}
