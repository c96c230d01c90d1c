//! Where the API server is, and who this process is there: by a kubeconfig, or by the service account of its pod.

use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use serde_json::Value;
use tokio::fs;

use super::exec_plugin::{self, PluginCluster};
use super::yaml;
use crate::settings::Environment;
use crate::settings::values::trimmed;
use journeyman_domain::limits::KUBERNETES_TOKEN_REREAD;

const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// How to reach an API server.
#[derive(Default)]
pub(super) struct Access {
    pub(super) server: String,
    /// Certificates (PEM) to trust instead of the system's.
    pub(super) ca: Option<Vec<u8>>,
    pub(super) is_unverified: bool,
    /// The name in the server's certificate.
    pub(super) server_name: Option<String>,
    pub(super) proxy: Option<String>,
    pub(super) credentials: Credentials,
}

#[derive(Default)]
pub(super) struct Credentials {
    /// Certificate and key (PEM).
    pub(super) identity: Option<Vec<u8>>,
    pub(super) headers: HeaderMap,
    /// The time after which they have to be read again.
    pub(super) valid_for: Option<Duration>,
}

impl Access {
    /// Reads a kubeconfig: a given one, else those of `KUBECONFIG` or the home directory, else the service account.
    pub(super) async fn read(kubeconfig: Option<&Path>) -> Result<Self, String> {
        if let Some(path) = kubeconfig {
            return Self::of_files(&[path.to_owned()]).await;
        }
        let environment = Environment::from_process();
        let variable = |name| environment.get(name);
        let files: Vec<PathBuf> = match (variable("KUBECONFIG"), variable("HOME")) {
            (Some(list), _) => std::env::split_paths(list).filter(|path| !path.as_os_str().is_empty()).collect(),
            (None, home) => home.map(|home| PathBuf::from(home).join(".kube/config")).into_iter().collect(),
        };
        let error = match Self::of_files(&files).await {
            Ok(access) => return Ok(access),
            Err(error) => error,
        };
        let address = (variable("KUBERNETES_SERVICE_HOST"), variable("KUBERNETES_SERVICE_PORT"));
        let (Some(host), Some(port)) = address else {
            return Err(format!("{error}; nor is this a pod: KUBERNETES_SERVICE_HOST is not set"));
        };
        Self::of_service_account(host, port, Path::new(SERVICE_ACCOUNT)).await
    }

    async fn of_service_account(host: &str, port: &str, folder: &Path) -> Result<Self, String> {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let ca = Some(read(&folder.join("ca.crt")).await?);
        let mut credentials = Credentials::default();
        credentials.read_token(&folder.join("token")).await?;
        Ok(Self { server: format!("https://{host}:{port}"), ca, credentials, ..Self::default() })
    }

    /// The first of several files that has an entry counts.
    async fn of_files(paths: &[PathBuf]) -> Result<Self, String> {
        let mut files = Vec::new();
        for path in paths {
            let text = String::from_utf8(read(path).await?).map_err(|_| format!("{} is no text", path.display()))?;
            let config = yaml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
            files.push((path.parent().unwrap_or_else(|| Path::new("")), config));
        }
        let find = |list: &str, field: &str, name: &str| {
            let missing = || format!("the kubeconfig has no {field} {name}");
            let entries = files.iter().flat_map(|(folder, config)| {
                config[list].as_array().into_iter().flatten().map(move |entry| (*folder, entry))
            });
            let mut entries = entries.filter(|(_, entry)| text(&entry["name"]).as_deref() == Some(name));
            entries.next().map(|(folder, entry)| Entry { folder, fields: entry[field].clone() }).ok_or_else(missing)
        };
        let context = files.iter().find_map(|(_, config)| text(&config["current-context"]));
        let context = context.ok_or("the kubeconfig has no current-context")?;
        let context = find("contexts", "context", &context)?;
        let cluster = find("clusters", "cluster", &context.text("cluster").unwrap_or_default())?;
        let user = context.text("user").and_then(|name| find("users", "user", &name).ok());
        let server = cluster.text("server").ok_or("the cluster of the kubeconfig has no server")?;
        let mut access = Self {
            server,
            ca: cluster.data("certificate-authority").await?,
            is_unverified: cluster.fields["insecure-skip-tls-verify"] == true,
            server_name: cluster.text("tls-server-name"),
            proxy: cluster.text("proxy-url"),
            credentials: Credentials::default(),
        };
        // A user that does not exist has no credentials, as for kubectl.
        if let Some(user) = user {
            let of = PluginCluster { access: &access, extensions: &cluster.fields["extensions"] };
            access.credentials = Credentials::of_user(&user, &of).await?;
        }
        Ok(access)
    }
}

impl Credentials {
    async fn of_user(user: &Entry<'_>, cluster: &PluginCluster<'_>) -> Result<Self, String> {
        let mut own = Self::default();
        if let Some(certificate) = user.data("client-certificate").await? {
            let key = user.data("client-key").await?.ok_or("the user of the kubeconfig has no client-key")?;
            own.identity = Some([certificate, key].join(&b'\n'));
        }
        if let Some(provider) = text(&user.fields["auth-provider"]["name"]) {
            return Err(format!("the auth-provider {provider} is not supported; use a credential plugin (`exec`)"));
        }
        if let (Some(name), Some(password)) = (user.text("username"), user.text("password")) {
            own.authorize("Basic", &STANDARD.encode(format!("{name}:{password}")))?;
        } else if let Some(token) = user.text("token") {
            own.authorize("Bearer", &token)?;
        } else if let Some(path) = user.text("tokenFile") {
            own.read_token(&user.folder.join(path)).await?;
        } else if user.fields["exec"].is_object() {
            let issued = exec_plugin::run(&user.fields["exec"], user.folder, cluster).await?;
            if let Some(token) = &issued.token {
                own.authorize("Bearer", token)?;
            }
            own.identity = issued.identity.or(own.identity);
            own.valid_for = issued.valid_for;
        }
        for (field, header) in [("as", "impersonate-user"), ("as-uid", "impersonate-uid")] {
            own.add_header(header, user.text(field))?;
        }
        for group in user.fields["as-groups"].as_array().into_iter().flatten() {
            own.add_header("impersonate-group", text(group))?;
        }
        if !user.fields["as-user-extra"].is_null() {
            return Err("as-user-extra of the kubeconfig is not supported".to_owned());
        }
        Ok(own)
    }

    async fn read_token(&mut self, path: &Path) -> Result<(), String> {
        let text = String::from_utf8(read(path).await?).unwrap_or_default();
        let token = trimmed(&text).ok_or_else(|| format!("{} holds no token", path.display()))?;
        self.valid_for = Some(KUBERNETES_TOKEN_REREAD);
        self.authorize("Bearer", token)
    }

    fn authorize(&mut self, scheme: &str, secret: &str) -> Result<(), String> {
        // The error would not quote it, and neither does this.
        let mut value = HeaderValue::try_from(format!("{scheme} {secret}"))
            .map_err(|_| "the credentials of the kubeconfig are not valid in a header")?;
        value.set_sensitive(true);
        self.headers.insert(AUTHORIZATION, value);
        Ok(())
    }

    fn add_header(&mut self, name: &'static str, value: Option<String>) -> Result<(), String> {
        if let Some(value) = value {
            let value = HeaderValue::try_from(&value).map_err(|_| format!("{value:?} is not valid in {name}"))?;
            self.headers.append(HeaderName::from_static(name), value);
        }
        Ok(())
    }
}

/// An entry of a kubeconfig. Its paths are relative to the folder of its file.
struct Entry<'a> {
    folder: &'a Path,
    fields: Value,
}

impl Entry<'_> {
    fn text(&self, field: &str) -> Option<String> {
        text(&self.fields[field])
    }

    /// What is given in place, or in a file.
    async fn data(&self, field: &str) -> Result<Option<Vec<u8>>, String> {
        if let Some(mut encoded) = self.text(&format!("{field}-data")) {
            encoded.retain(|char| !char.is_ascii_whitespace());
            let invalid = |error| format!("{field}-data of the kubeconfig is no base64: {error}");
            return STANDARD.decode(encoded).map(Some).map_err(invalid);
        }
        match self.text(field) {
            Some(path) => read(&self.folder.join(path)).await.map(Some),
            None => Ok(None),
        }
    }
}

/// A text that is not empty, trimmed. A number may be meant as one.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => trimmed(text).map(str::to_owned),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
    }
}

async fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).await.map_err(|error| format!("cannot read {}: {error}", path.display()))
}
