//! Checks that the files and programs of a configuration can be used on this host. Starts nothing, reports every problem at
//! once, and never shows a secret.

use std::path::Path;

use super::taskcluster_setup::build_credentials;
use crate::config::LoadedConfig;
use crate::config::schema::Source;
use journeyman_platform::host::program_path::find_program;
use journeyman_platform::settings::problem::{Code, Problem, ValueOrigin};
use journeyman_platform::settings::values::{File, SecretFile};
use journeyman_platform::settings::{Environment, secrets};
use journeyman_services::controller::config::PoolConfig;
use journeyman_services::notifier::config::Notifier;
use journeyman_worker::handler::config::Handler;
use journeyman_worker::handler::{environment, program};
use journeyman_worker::source::taskcluster::config::TaskclusterSource;

pub(super) fn check_files(loaded: &LoadedConfig, environment: &Environment) -> Vec<Problem> {
    let mut checks = FileChecks { loaded, environment, problems: Vec::new() };
    for (name, source) in &loaded.config.source {
        if let Source::Taskcluster(source) = source {
            checks.credentials(&format!("source.{name}"), source);
        }
    }
    for (name, handler) in &loaded.config.handler {
        checks.handler(name, handler);
    }
    for (id, client) in &loaded.config.queue.clients {
        let key = format!("queue.clients.{id}.access_token_file");
        checks.secret(&key, Some(&client.access_token_file), "an access token");
    }
    let amqp = &loaded.config.amqp;
    checks.secret("amqp.uri_file", amqp.uri_file.as_ref(), "an AMQP address");
    checks.secret("http.token_file", loaded.config.http.token_file.as_ref(), "a token");
    for (name, target) in &loaded.config.console.target {
        checks.secret(&format!("console.target.{name}.token_file"), target.token_file.as_ref(), "a token");
    }
    if let Some(File(path)) = &amqp.key_file
        && secrets::is_world_readable(path)
    {
        checks.world_readable("amqp.key_file", path, "a private key");
    }
    checks.notifier(&loaded.config.notifier);
    checks.secret("notify.token_file", loaded.config.notify.token_file.as_ref(), "a token");
    for (name, pool) in &loaded.config.pool {
        checks.pool(&format!("pool.{name}"), pool);
    }
    let work_dir = &loaded.config.worker.work_dir.0;
    if work_dir.exists() && !work_dir.is_dir() {
        let what = format!("{} is not a directory", work_dir.display());
        checks.unusable("worker.work_dir", what, "set it to a directory");
    }
    checks.problems
}

const PROGRAM_HELP: &str = "a program is an executable file, or a name that is found in PATH";

struct FileChecks<'a> {
    loaded: &'a LoadedConfig,
    environment: &'a Environment,
    problems: Vec<Problem>,
}

impl FileChecks<'_> {
    fn credentials(&mut self, key: &str, source: &TaskclusterSource) {
        self.secret(&format!("{key}.access_token_file"), source.access_token_file.as_ref(), "an access token");
        self.secret(&format!("{key}.certificate_file"), source.certificate_file.as_ref(), "a certificate");
        let static_secret = source.worker_pool.as_ref().and_then(|pool| pool.static_secret_file.as_ref());
        self.secret(&format!("{key}.worker_pool.static_secret_file"), static_secret, "a static secret");
        let Ok(Some(credentials)) = source.read_credentials(self.environment) else { return };
        if let Err(failure) = build_credentials(&credentials) {
            self.unusable(&format!("{key}.client_id"), format!("[{key}] cannot sign: {}", failure.message), "");
        }
    }

    fn notifier(&mut self, config: &Notifier) {
        self.secret("notifier.token_file", config.token_file.as_ref(), "a token");
        self.secret("notifier.read_token_file", config.read_token_file.as_ref(), "a token");
        self.secret("notifier.publish_token_file", config.publish_token_file.as_ref(), "a token");
        self.secret("notifier.proxy_file", config.proxy_file.as_ref(), "a proxy's URL");
        self.secret("notifier.client_key_file", config.client_key_file.as_ref(), "a private key");
        for file in &config.seal_key_files {
            self.secret("notifier.seal_key_files", Some(file), "a seal key");
        }
        for (name, endpoint) in &config.endpoint {
            let key = |name_of_key| format!("notifier.endpoint.{name}.{name_of_key}");
            self.secret(&key("url_file"), endpoint.url_file.as_ref(), "a URL");
            self.secret(&key("headers_file"), endpoint.headers_file.as_ref(), "headers");
            for file in &endpoint.key_files {
                self.secret(&key("key_files"), Some(file), "a signing key");
            }
        }
    }

    /// Searches the program of the pool's workers with the PATH that they get.
    fn pool(&mut self, key: &str, pool: &PoolConfig) {
        let Some(program) = pool.command.first() else { return };
        let own = pool.env.iter().map(|(name, value)| (name.clone(), value.0.clone()));
        let env = self.environment.pairs().filter(|(name, _)| name == "PATH").chain(own).collect();
        if let Err(error) = find_program(program, &env, Path::new("")) {
            self.unusable(&format!("{key}.command"), error.to_string(), PROGRAM_HELP);
        }
    }

    fn secret(&mut self, key: &str, file: Option<&SecretFile>, holds: &'static str) {
        let path = match file {
            Some(SecretFile::File(path)) => path.clone(),
            Some(SecretFile::Systemd(name)) => match secrets::systemd_credential_path(name, self.environment) {
                Some(path) => path,
                None => return,
            },
            // Only the worker's environment has it.
            Some(SecretFile::Variable(_)) | None => return,
        };
        match secrets::read_file(&path, holds) {
            Ok(_) if secrets::is_world_readable(&path) => self.world_readable(key, &path, holds),
            Ok(_) => {}
            Err(error) => self.unusable(key, error.to_string(), ""),
        }
    }

    fn handler(&mut self, name: &str, handler: &Handler) {
        match handler {
            Handler::Command(handler) => {
                let key = format!("handler.{name}.chain_of_trust_key");
                self.secret(&key, handler.chain_of_trust_key.as_ref(), "a signing key");
            }
            Handler::Program(handler) => {
                self.programs(name, &handler.env_allow, &[("exec", &handler.exec), ("check", &handler.check)]);
                if let Err(error) = program::Program::new(name, handler.clone(), self.environment) {
                    let help = "it must be a file with a JSON Schema";
                    self.unusable(&format!("handler.{name}.schema"), error.message, help);
                }
            }
            Handler::Http(handler) => self.programs(name, &handler.env_allow, &[("exec", &handler.exec)]),
            // It was made when it was read.
            Handler::Custom(_) => {}
            Handler::Kubernetes(handler) => {
                if let Err(error) = journeyman_worker::handler::kubernetes::Kubernetes::new(name, handler.clone()) {
                    let help = "it must be YAML with the expressions of Jinja";
                    self.unusable(&format!("handler.{name}.template"), error.message, help);
                }
            }
        }
    }

    fn programs(&mut self, name: &str, env_allow: &[String], programs: &[(&str, &Vec<String>)]) {
        let env = environment::select(env_allow, self.environment.pairs());
        for (key, arguments) in programs {
            let Some(program) = arguments.first() else { continue };
            if let Err(error) = find_program(program, &env, Path::new("")) {
                self.unusable(&format!("handler.{name}.{key}"), error.to_string(), PROGRAM_HELP);
            }
        }
    }

    fn world_readable(&mut self, key: &str, path: &Path, holds: &str) {
        let (path, origin) = (path.display(), self.origin(key));
        let message = format!("`{key}`: every user of this host can read {path}, which holds {holds}");
        self.problems.push(Problem::warning(Code::File, message, origin, format!("`chmod 600 {path}` restricts it")));
    }

    fn unusable(&mut self, key: &str, what: String, help: &str) {
        let help = Some(help.to_owned()).filter(|help| !help.is_empty());
        let origin = self.origin(key);
        self.problems.push(Problem { help, ..Problem::error(Code::File, format!("`{key}`: {what}"), origin) });
    }

    fn origin(&self, key: &str) -> ValueOrigin {
        self.loaded.origins.get(key).cloned().unwrap_or(ValueOrigin::Default)
    }
}
