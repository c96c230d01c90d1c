//! Checks a Taskcluster source step by step; a failed step ends the rest.

use jiff::{SignedDuration, Timestamp};

use crate::cli::checks::Check;
use crate::cli::taskcluster_setup;
use crate::cli::worker_identity::WorkerIdentity;
use journeyman_domain::limits::{DOCTOR_CALL_TIMEOUT, DOCTOR_STEP_TIMEOUT};
use journeyman_domain::refusal::Refusal;
use journeyman_platform::settings::Environment;
use journeyman_services::queue::scopes::satisfies;
use journeyman_worker::source::CallError;
use journeyman_worker::source::taskcluster::config::TaskclusterSource;
use journeyman_worker::source::taskcluster::{Api, ApiConfig, CredentialCheck, Credentials, Dialect, Timeouts};

const SKEW_WARNING: SignedDuration = SignedDuration::from_secs(5);
/// Hawk and signed URLs allow one minute of clock skew.
const SKEW_MAX: SignedDuration = SignedDuration::from_secs(60);

/// `claims_as` is the worker that claims from the source, `None` if its tasks are only counted.
pub(super) async fn check_source(
    name: &str,
    source: &TaskclusterSource,
    claims_as: Option<&WorkerIdentity>,
    environment: &Environment,
) -> Vec<Check> {
    let mut checks = Vec::new();
    let source = SourceChecks { name, source, claims_as, environment };
    if let Err(check) = source.run(&mut checks).await {
        checks.push(check);
    }
    for check in &mut checks {
        check.name = format!("{name}: {}", check.name);
    }
    checks
}

struct SourceChecks<'a> {
    name: &'a str,
    source: &'a TaskclusterSource,
    claims_as: Option<&'a WorkerIdentity>,
    environment: &'a Environment,
}

impl SourceChecks<'_> {
    /// # Errors
    ///
    /// A check without which the next ones make no sense.
    async fn run(&self, checks: &mut Vec<Check>) -> Result<(), Check> {
        // Without credentials, so that wrong ones do not fail this step.
        let unsigned = self.api(None)?;
        let date = unsigned.ping().await.map_err(|refused| {
            if refused.message.contains("certificate") {
                let fix = "check the certificate, the CA certificates of this host (ca-certificates) and its clock";
                return Check::failed("tls", refused.message, fix);
            }
            let fix = format!(
                "check source.{}.root_url, and that this host resolves and reaches it; `curl -i {}/api/queue/v1/ping` shows the \
                 response",
                self.name,
                unsigned.root_url()
            );
            Check::failed("queue", refused.message, fix)
        })?;
        checks.push(Check::ok("queue", format!("{} responds", unsigned.root_url())));
        checks.push(check_clock(date));
        let (client, credentials) = self.load_credentials()?;
        let api = self.api(Some(credentials))?;
        let queue = self.source.task_queue.to_string();
        let known = api.check_credentials(&queue).await.map_err(|refused| {
            match refused.refusal {
                Refusal::Rejected => return self.task_queue_failed(refused),
                Refusal::Retry { .. } | Refusal::Throttled { .. } => return service_failed("credentials", refused),
                Refusal::Full | Refusal::Denied | Refusal::Gone | Refusal::Stale => {}
            }
            let fix = format!(
                "check client id and access token of source.{}, and that the client has not expired",
                self.name
            );
            Check::failed("credentials", refused.message, fix)
        })?;
        checks.push(Check::ok("credentials", format!("{client} is valid")));
        checks.push(self.check_scopes(known));
        checks.push(match api.pending_count(&queue).await {
            Ok(pending) => match api.workers(&queue).await.map(|page| page.entries.len()) {
                Ok(0) if pending > 0 => {
                    let fix = "start a worker for it, or compare `task_queue` with the queue that the tasks name";
                    Check::warning(
                        "task queue",
                        format!("{queue}: {pending} pending, and no worker has claimed lately"),
                        fix,
                    )
                }
                Ok(workers) => Check::ok(
                    "task queue",
                    format!("{queue}: {pending} pending; workers that claimed lately: {workers}"),
                ),
                Err(_) => Check::ok("task queue", format!("{queue}: {pending} pending")),
            },
            // The credentials are valid.
            Err(refused) if refused.refusal == Refusal::Denied && self.claims_as.is_some() => {
                Check::ok("task queue", format!("{queue}: no scope to see the number of pending tasks"))
            }
            Err(refused) if matches!(refused.refusal, Refusal::Retry { .. }) => service_failed("task queue", refused),
            Err(refused) => self.task_queue_failed(refused),
        });
        if let Some(worker) = self.claims_as
            && let Ok(Some(until)) = api.quarantined_until(&queue, &worker.group, &worker.id).await
        {
            let found = format!("{}/{} is in quarantine until {until}: it gets no tasks", worker.group, worker.id);
            checks.push(Check::failed("quarantine", found, "an operator of the queue can lift it"));
        }
        Ok(())
    }

    fn api(&self, credentials: Option<Credentials>) -> Result<Api, Check> {
        let timeouts = Timeouts { connect: DOCTOR_STEP_TIMEOUT, call: DOCTOR_CALL_TIMEOUT, ..Timeouts::default() };
        let allow_hosts = self.source.allow_hosts.clone();
        let config = ApiConfig { allow_hosts, timeouts, ..ApiConfig::new(self.source.root_url.as_str(), credentials) };
        Api::new(config).map_err(|error| Check::failed("queue", error.to_string(), "see `journeyman config check`"))
    }

    fn load_credentials(&self) -> Result<(&str, Credentials), Check> {
        let Some(client) = self.source.client_id.as_deref() else {
            if self.source.worker_pool.as_ref().is_some_and(|pool| pool.provider_id.is_some()) {
                return Err(Check::ok("credentials", "the worker gets them by registering, which is not tried here"));
            }
            let fix = format!("set source.{}.client_id", self.name);
            return Err(Check::warning("credentials", "none configured: requests are not signed", fix));
        };
        let credentials = taskcluster_setup::read_credentials(self.source, self.environment).ok().flatten();
        credentials.map(|credentials| (client, credentials)).ok_or_else(|| {
            let fix =
                "for `systemd:NAME` set CREDENTIALS_DIRECTORY to the directory of the file, such as /etc/journeyman";
            Check::warning("credentials", format!("cannot read the credentials of {client} from this process"), fix)
        })
    }

    fn task_queue_failed(&self, refused: CallError) -> Check {
        Check::failed("task queue", refused.message, format!("check source.{}.task_queue", self.name))
    }

    /// Required and optional scopes.
    fn scopes(&self) -> (Vec<String>, Vec<String>) {
        let queue = &self.source.task_queue;
        let claimed_list = format!("queue:claimed-list:{queue}");
        let Some(worker) = self.claims_as else {
            return (vec![format!("queue:pending-count:{queue}")], vec![claimed_list]);
        };
        let (worker_id, status) =
            (format!("queue:worker-id:{}/{}", worker.group, worker.id), "queue:status:*".to_owned());
        let get_worker = format!("queue:get-worker:{queue}/{}/{}", worker.group, worker.id);
        match self.source.dialect {
            Dialect::ClaimWork => (
                vec![format!("queue:claim-work:{queue}"), worker_id],
                vec![status, claimed_list, "queue:reclaim-task:*".to_owned(), get_worker],
            ),
            Dialect::Azure => (
                vec![format!("queue:poll-task-urls:{queue}"), format!("queue:claim-task:{queue}"), worker_id],
                vec![status],
            ),
        }
    }

    fn check_scopes(&self, known: CredentialCheck) -> Check {
        let (required, optional) = self.scopes();
        let have = match known {
            CredentialCheck::Scopes(have) => have,
            CredentialCheck::Accepted => {
                let found = format!("not shown by this service to this client; required: {}", required.join(", "));
                return Check::ok("scopes", found);
            }
        };
        let missing = |mut scopes: Vec<String>| {
            scopes.retain(|scope| !satisfies(&have, scope));
            scopes.join(", ")
        };
        match (missing(required), missing(optional)) {
            (required, optional) if required.is_empty() && optional.is_empty() => {
                Check::ok("scopes", "all required and optional scopes")
            }
            (required, optional) if required.is_empty() => {
                let guide = if self.claims_as.is_some() { "taskcluster" } else { "controller" };
                let fix = format!("`journeyman guide {guide}` explains each of them");
                Check::warning("scopes", format!("all required; optional scopes missing: {optional}"), fix)
            }
            (required, _) => {
                Check::failed("scopes", format!("missing: {required}"), "grant them to the client or one of its roles")
            }
        }
    }
}

fn service_failed(check: &'static str, refused: CallError) -> Check {
    let fix = "the service responds, but it fails: its log says why (is its database up?); nothing is wrong here";
    Check::failed(check, refused.message, fix)
}

fn check_clock(date: Option<Timestamp>) -> Check {
    let Some(date) = date else {
        let fix = "Taskcluster sends a Date header; does a proxy remove it?";
        return Check::warning("clock", "no Date header in the response", fix);
    };
    let skew = date.duration_since(Timestamp::now());
    let way = if skew.is_negative() { "ahead of" } else { "behind" };
    let found = format!("clock is {} s {way} that of the service", skew.abs().as_secs());
    let fix = "synchronize it with chronyd or systemd-timesyncd; see `timedatectl`";
    match skew.abs() {
        skew if skew > SKEW_MAX => Check::failed("clock", found, fix),
        skew if skew > SKEW_WARNING => Check::warning("clock", found, fix),
        _ => Check::ok("clock", "clock agrees with that of the service"),
    }
}
