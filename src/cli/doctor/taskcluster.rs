//! Checks a Taskcluster source step by step; a failed step ends the rest.

use jiff::{SignedDuration, Timestamp};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::Check;
use crate::cli::target;
use crate::cli::worker_setup::WorkerIdentity;
use crate::config::Environment;
use crate::config::schema::TaskclusterSource;
use crate::domain::refusal::Refusal;
use crate::limits::{DOCTOR_CALL_TIMEOUT, DOCTOR_STEP_TIMEOUT};
use crate::source::taskcluster::Dialect;
use crate::source::taskcluster::{Api, ApiConfig, CredentialCheck, Timeouts};

const SKEW_WARNING: SignedDuration = SignedDuration::from_secs(5);
/// Hawk and signed URLs allow one minute of clock skew.
const SKEW_MAX: SignedDuration = SignedDuration::from_secs(60);

pub(super) async fn check_source(
    name: String,
    source: TaskclusterSource,
    own: WorkerIdentity,
    environment: Environment,
) -> Vec<Check> {
    let mut check = SourceCheck { name, source, worker: own, environment, checks: Vec::new() };
    // `None` only says that a step has failed; its check is in the list.
    _ = check.run().await;
    check.checks
}

struct SourceCheck {
    name: String,
    source: TaskclusterSource,
    worker: WorkerIdentity,
    environment: Environment,
    checks: Vec<Check>,
}

impl SourceCheck {
    async fn run(&mut self) -> Option<()> {
        let url = self.source.root_url.parts();
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default()?;
        self.check_connection(&host, port).await?;
        // Without credentials, so that wrong ones do not fail this step.
        let unsigned = self.api(None)?;
        self.check_service(&unsigned).await?;
        self.check_credentials().await
    }

    fn part(&self, part: &str) -> String {
        format!("{}: {part}", self.name)
    }

    fn ok(&mut self, part: &str, found: impl Into<String>) {
        self.checks.push(Check::ok(self.part(part), found));
    }

    fn warning(&mut self, part: &str, found: impl Into<String>, fix: impl Into<String>) {
        self.checks.push(Check::warning(self.part(part), found, fix));
    }

    /// `None` ends the steps.
    fn failed(&mut self, part: &str, found: impl Into<String>, fix: impl Into<String>) -> Option<()> {
        self.checks.push(Check::failed(self.part(part), found, fix));
        None
    }

    async fn check_connection(&mut self, host: &str, port: u16) -> Option<()> {
        let fix =
            format!("check source.{}.root_url, and that this host resolves it (`getent hosts {host}`)", self.name);
        let found = match timeout(DOCTOR_STEP_TIMEOUT, lookup_host((host, port))).await {
            Ok(Ok(found)) => found.collect::<Vec<_>>(),
            Ok(Err(error)) => return self.failed("name", format!("cannot resolve {host}: {error}"), fix),
            Err(_) => {
                return self.failed(
                    "name",
                    format!("cannot resolve {host}: no response within {} s", DOCTOR_STEP_TIMEOUT.as_secs()),
                    fix,
                );
            }
        };
        let addresses: Vec<String> = found.iter().map(|address| address.ip().to_string()).collect();
        self.ok("name", format!("{host} resolves to {}", addresses.join(", ")));
        let mut refused = String::from("no address");
        for address in &found {
            match timeout(DOCTOR_STEP_TIMEOUT, TcpStream::connect(address)).await {
                Ok(Ok(_)) => {
                    self.ok("connection", format!("{host} accepts connections on port {port}"));
                    return Some(());
                }
                Ok(Err(error)) => refused = error.to_string(),
                Err(_) => refused = format!("no response within {} s", DOCTOR_STEP_TIMEOUT.as_secs()),
            }
        }
        let fix = "is the service running, is the port right, does a firewall block it?";
        self.failed("connection", format!("{host} port {port}: {refused}"), fix)
    }

    fn api(&mut self, credentials: Option<crate::source::taskcluster::Credentials>) -> Option<Api> {
        let source = &self.source;
        let settings = ApiConfig {
            root_url: self.source.root_url.as_str().to_owned(),
            credentials,
            allow_hosts: source.allow_hosts.clone(),
            timeouts: Timeouts { connect: DOCTOR_STEP_TIMEOUT, call: DOCTOR_CALL_TIMEOUT, ..Timeouts::default() },
        };
        match Api::new(settings) {
            Ok(api) => Some(api),
            Err(error) => {
                self.failed("queue", error.to_string(), "see `journeyman config check`");
                None
            }
        }
    }

    fn load_credentials(&self) -> Option<crate::source::taskcluster::Credentials> {
        let keys = self.source.credentials();
        // The descriptor belongs to the worker's process.
        if keys.uses_descriptor() {
            return None;
        }
        let own = keys.read(&self.environment).ok()??;
        target::build_credentials(&own.client_id, &own.access_token, own.certificate.as_ref()).ok()
    }

    async fn check_service(&mut self, api: &Api) -> Option<()> {
        let clock = match api.ping().await {
            Ok(clock) => clock,
            Err(refused) if refused.message.contains("certificate") => {
                let fix = "check the certificate, the CA certificates of this host (ca-certificates) and its clock";
                return self.failed("tls", refused.message, fix);
            }
            Err(refused) => {
                let fix = format!("`curl -i {}/api/queue/v1/ping` shows the response", api.root_url());
                return self.failed("queue", refused.message, fix);
            }
        };
        self.ok("queue", format!("{} responds", api.root_url()));
        self.check_clock(clock);
        Some(())
    }

    fn check_clock(&mut self, theirs: Option<Timestamp>) {
        let Some(theirs) = theirs else {
            let fix = "Taskcluster sends a Date header; does a proxy remove it?";
            return self.warning("clock", "no Date header in the response", fix);
        };
        let apart = theirs.duration_since(Timestamp::now());
        let (far, way) = (apart.abs(), if apart.is_negative() { "ahead of" } else { "behind" });
        let found = format!("clock is {} s {way} that of the service", far.as_secs());
        let fix = "synchronize it with chronyd or systemd-timesyncd; see `timedatectl`";
        if far > SKEW_MAX {
            self.failed("clock", found, fix);
        } else if far > SKEW_WARNING {
            self.warning("clock", found, fix);
        } else {
            self.ok("clock", "clock agrees with that of the service");
        }
    }

    async fn check_credentials(&mut self) -> Option<()> {
        let queue = self.source.task_queue.to_string();
        let Some(client) = self.source.client_id.clone() else {
            self.warning(
                "credentials",
                "none configured: requests are not signed",
                format!("set source.{}.client_id", self.name),
            );
            return None;
        };
        let Some(own) = self.load_credentials() else {
            let fix =
                "for `systemd:NAME` set CREDENTIALS_DIRECTORY to the directory of the file, such as /etc/journeyman";
            self.warning("credentials", format!("cannot read the credentials of {client} from this process"), fix);
            return None;
        };
        let api = self.api(Some(own))?;
        let known = match api.check_credentials(&queue).await {
            Ok(known) => known,
            Err(refused) if refused.refusal == Refusal::Rejected => {
                let fix = format!("check source.{}.task_queue", self.name);
                return self.failed("task queue", refused.message, fix);
            }
            Err(refused) => {
                let fix = format!(
                    "check client id and access token of source.{}, and that the client has not expired",
                    self.name
                );
                return self.failed("credentials", refused.message, fix);
            }
        };
        self.ok("credentials", format!("{client} is valid"));
        match known {
            CredentialCheck::Scopes(have) => self.check_scopes(&have),
            CredentialCheck::Accepted => {
                let need = self.required_scopes().join(", ");
                self.ok("scopes", format!("not shown by this service; required: {need}"));
            }
        }
        match api.pending_count(&queue).await {
            Ok(waiting) => self.ok("task queue", format!("{queue}: {waiting} pending")),
            // The credentials are valid.
            Err(refused) if refused.refusal == Refusal::Denied => {
                self.ok("task queue", format!("{queue}: no scope to see the number of pending tasks"))
            }
            Err(refused) => {
                self.failed("task queue", refused.message, format!("check source.{}.task_queue", self.name));
            }
        }
        Some(())
    }

    fn required_scopes(&self) -> Vec<String> {
        let queue = self.source.task_queue.to_string();
        let worker = format!("queue:worker-id:{}/{}", self.worker.group, self.worker.id);
        match self.source.dialect {
            Dialect::ClaimWork => vec![format!("queue:claim-work:{queue}"), worker],
            Dialect::Azure => {
                vec![format!("queue:poll-task-urls:{queue}"), format!("queue:claim-task:{queue}"), worker]
            }
        }
    }

    fn check_scopes(&mut self, have: &[String]) {
        let lacks =
            |needed: Vec<String>| needed.into_iter().filter(|scope| !is_granted(scope, have)).collect::<Vec<_>>();
        let missing = lacks(self.required_scopes());
        if !missing.is_empty() {
            self.failed(
                "scopes",
                format!("missing: {}", missing.join(", ")),
                "grant them to the client or one of its roles",
            );
            return;
        }
        let queue = &self.source.task_queue;
        let mut useful = vec!["queue:status:*".to_owned()];
        if self.source.dialect == Dialect::ClaimWork {
            useful.extend([format!("queue:claimed-list:{queue}"), "queue:reclaim-task:*".to_owned()]);
        }
        let without = lacks(useful);
        if without.is_empty() {
            self.ok("scopes", "all required and optional scopes");
        } else {
            let fix = "`journeyman guide taskcluster` explains each of them";
            self.warning("scopes", format!("all required; optional scopes missing: {}", without.join(", ")), fix);
        }
    }
}

/// A scope that ends in `*` covers all scopes with this prefix.
fn is_granted(scope: &str, have: &[String]) -> bool {
    have.iter().any(|own| own == scope || own.strip_suffix('*').is_some_and(|start| scope.starts_with(start)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_covers_scopes_with_its_prefix_only() {
        let have = ["queue:claim-work:build/*".to_owned(), "queue:worker-id:g/w".to_owned()];
        assert!(is_granted("queue:claim-work:build/linux", &have) && is_granted("queue:worker-id:g/w", &have));
        assert!(!is_granted("queue:claim-work:test/linux", &have) && !is_granted("queue:worker-id:g/w2", &have));
        assert!(!is_granted("queue:reclaim-task:*", &["queue:reclaim-task:a".to_owned()]));
    }
}
