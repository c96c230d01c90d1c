//! Runs a credential plugin of a kubeconfig.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::kubeconfig::{Access, text};
use super::yaml;
use crate::host::run_program;
use journeyman_domain::limits::{KUBERNETES_PLUGIN_TIMEOUT, KUBERNETES_RENEWAL_MARGIN};

/// The cluster that a plugin may want to know of.
pub(super) struct PluginCluster<'a> {
    pub(super) access: &'a Access,
    pub(super) extensions: &'a Value,
}

/// What a plugin has issued.
pub(super) struct IssuedCredentials {
    pub(super) token: Option<String>,
    pub(super) identity: Option<Vec<u8>>,
    pub(super) valid_for: Option<Duration>,
}

/// # Cancel safety
///
/// Kills the plugin.
pub(super) async fn run(exec: &Value, folder: &Path, cluster: &PluginCluster<'_>) -> Result<IssuedCredentials, String> {
    let program = text(&exec["command"]).ok_or("exec of the kubeconfig has no command")?;
    let failed = |why: String| format!("the credential plugin {program} failed: {why}");
    if exec["interactiveMode"] == "Always" {
        return Err(failed("it needs a terminal (`interactiveMode: Always`)".to_owned()));
    }
    let path = if program.contains('/') { folder.join(&program) } else { PathBuf::from(&program) };
    let mut command = Command::new(path);
    command.args(exec["args"].as_array().into_iter().flatten().filter_map(text));
    for variable in exec["env"].as_array().into_iter().flatten() {
        if let Some(name) = text(&variable["name"]) {
            command.env(name, text(&variable["value"]).unwrap_or_default());
        }
    }
    let mut spec = json!({ "interactive": false });
    if exec["provideClusterInfo"] == true {
        spec["cluster"] = cluster.info();
    }
    let info = json!({ "apiVersion": exec["apiVersion"], "kind": "ExecCredential", "spec": spec });
    command.env("KUBERNETES_EXEC_INFO", info.to_string());
    let ran = match timeout(KUBERNETES_PLUGIN_TIMEOUT, run_program::run(command, b"")).await {
        Ok(Ok(ran)) => ran,
        Ok(Err(error)) => {
            let hint = text(&exec["installHint"]).map(|hint| format!("; {hint}")).unwrap_or_default();
            return Err(failed(format!("{error}{hint}")));
        }
        Err(_) => return Err(failed(format!("it did not end within {KUBERNETES_PLUGIN_TIMEOUT:?}"))),
    };
    if !ran.status.success() {
        let said = if ran.stderr.is_empty() { String::new() } else { format!(": {}", ran.stderr) };
        return Err(failed(format!("{}{said}", ran.status)));
    }
    // Its output is secret.
    let credential =
        yaml::from_str(&ran.stdout).map_err(|error| failed(format!("its output is not valid: {error}")))?;
    IssuedCredentials::read(&credential["status"], Timestamp::now()).map_err(failed)
}

impl IssuedCredentials {
    fn read(status: &Value, now: Timestamp) -> Result<Self, String> {
        let [token, certificate, key] =
            ["token", "clientCertificateData", "clientKeyData"].map(|field| text(&status[field]));
        let identity = certificate.zip(key).map(|(certificate, key)| format!("{certificate}\n{key}").into_bytes());
        if token.is_none() && identity.is_none() {
            return Err("its output has neither a token nor a certificate with its key".to_owned());
        }
        let valid_for = match text(&status["expirationTimestamp"]).map(|time| time.parse::<Timestamp>()) {
            Some(Ok(time)) => {
                let left = Duration::try_from(time.duration_since(now)).unwrap_or_default();
                Some(left - KUBERNETES_RENEWAL_MARGIN.min(left / 2))
            }
            Some(Err(error)) => return Err(format!("its expirationTimestamp is not valid: {error}")),
            None => None,
        };
        Ok(Self { token, identity, valid_for })
    }
}

impl PluginCluster<'_> {
    fn info(&self) -> Value {
        let Access { server, ca, is_unverified, server_name, proxy, .. } = self.access;
        let mut info = json!({ "server": server, "insecure-skip-tls-verify": is_unverified });
        let fields = [
            ("certificate-authority-data", ca.as_ref().map(|ca| STANDARD.encode(ca))),
            ("tls-server-name", server_name.clone()),
            ("proxy-url", proxy.clone()),
        ];
        for (field, value) in fields {
            if let Some(value) = value {
                info[field] = json!(value);
            }
        }
        let of_plugins = |one: &&Value| one["name"] == "client.authentication.k8s.io/exec";
        if let Some(config) = self.extensions.as_array().into_iter().flatten().find(of_plugins) {
            info["config"] = config["extension"].clone();
        }
        info
    }
}
