//! Signed lists of artifacts, verified by scriptworker.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use journeyman::handler::chain_of_trust::SigningKey;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use crate::payloads::deployment::Deployment;
use crate::payloads::users::as_users;
use crate::support::needs;

/// Verifies as scriptworker does when it has downloaded the two files.
const VERIFY: &str = r#"
import json, sys, types, importlib.resources
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from scriptworker.cot.verify import verify_link_ed25519_cot_signature
from scriptworker.ed25519 import ed25519_public_key_to_string, ed25519_private_key_from_string
from scriptworker.client import validate_json_schema
seed, unsigned, signature = sys.argv[1:]
public = ed25519_public_key_to_string(ed25519_private_key_from_string(seed).public_key())
config = {"verify_cot_signature": True, "ed25519_public_keys": {"generic-worker": [public]}}
chain = types.SimpleNamespace(context=types.SimpleNamespace(config=config))
link = types.SimpleNamespace(name="build", task_id="task", worker_impl="generic-worker", cot=None)
verify_link_ed25519_cot_signature(chain, link, unsigned, signature)
schema = json.loads((importlib.resources.files("scriptworker") / "data/cot_v1_schema.json").read_text())
validate_json_schema(link.cot, schema, name="cot")
print("verified")
"#;

fn verified(python: &str, seed: &str, list: &[u8], signature: &[u8]) -> Result<(), String> {
    let folder = tempfile::tempdir().expect("a folder");
    let paths = [("list", list), ("signature", signature)].map(|(name, content)| {
        let path = folder.path().join(name);
        std::fs::write(&path, content).expect("written");
        path
    });
    let output =
        std::process::Command::new(python).args(["-c", VERIFY, seed]).args(paths).output().expect("python runs");
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

const SEED: [u8; 32] = [7; 32];

pub(super) fn signing_key() -> SigningKey {
    SigningKey::parse(&STANDARD.encode(SEED)).expect("a key")
}

#[tokio::test]
async fn scriptworker_verifies_the_chain_of_trust_of_a_task() {
    let Some(python) = needs("JOURNEYMAN_TEST_PAYLOADS_PYTHON") else { return };
    let deployment = Deployment::start().await;
    let seed = STANDARD.encode(SEED);
    let signed = json!({
        "features": { "chainOfTrust": true },
        "artifacts": [{ "type": "file", "path": "f", "name": "public/f" }, { "type": "directory", "path": "d", "name": "public/d" }],
    });
    let as_worker = deployment.run_one("true", signed.clone(), |_| {}).await.exception("malformed-payload");
    assert!(as_worker.contains("this worker has no key for it"), "{as_worker}");
    let Some(handler) = as_users(&deployment, deployment.signing_handler(signing_key()), &["backup"]) else { return };
    let scopes = |definition: &mut Value| definition["scopes"] = json!([]);
    let task = deployment.create("echo content >f; mkdir d; echo more >d/x", signed, scopes).await;
    deployment.run_with(handler, 1, &[&task]).await.remove(0).completed();
    let list = deployment.queue.content(&task, 0, "public/chain-of-trust.json").await;
    let signature = deployment.queue.content(&task, 0, "public/chain-of-trust.json.sig").await;
    assert_eq!(verified(&python, &seed, &list, &signature), Ok(()));
    let changed = [list.as_slice(), b" "].concat();
    assert!(verified(&python, &seed, &changed, &signature).is_err());
    let read: Value = serde_json::from_slice(&list).expect("JSON");
    assert_eq!(
        (&read["taskId"], &read["runId"], &read["workerId"]),
        (&json!(task.as_str()), &json!(0), &json!("worker"))
    );
    let artifacts = read["artifacts"].as_object().expect("an object");
    let names: Vec<_> = artifacts.keys().map(String::as_str).collect();
    assert_eq!(names, ["public/d/x", "public/f", "public/logs/certified.log"]);
    for (name, digest) in artifacts {
        let content = deployment.queue.content(&task, 0, name).await;
        assert_eq!(digest["sha256"], hex::encode(Sha256::digest(&content)), "{name}");
    }
}
