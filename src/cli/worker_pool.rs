//! Keeps a worker registered in its pools, has it leave when they do not need it, and reports its alerts there.

use std::convert::Infallible;
use std::sync::Arc;

use futures_util::future::join_all;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::exit::{Exit, ExitResult, Failure};
use super::worker_identity::WorkerIdentity;
use journeyman_domain::limits::{POOL_CHECK_TIMEOUT, POOL_REGISTRATION_TIMEOUT};
use journeyman_domain::worker_pool::{AlertReports, PoolDecision, PoolMember};
use journeyman_platform::host::clock::{Clock, or_pending};
use journeyman_platform::log::AlertLine;
use journeyman_platform::settings::Environment;
use journeyman_worker::engine::Control;
use journeyman_worker::source::taskcluster::config::TaskclusterSource;
use journeyman_worker::source::taskcluster::{Api, WorkerPool};

/// The pools of a worker's sources.
#[derive(Default)]
pub(super) struct WorkerPools(Vec<Membership>);

struct Membership {
    pool: Arc<WorkerPool>,
    member: PoolMember,
    remove_on_exit: bool,
    last_error: String,
}

impl WorkerPools {
    /// Adds the pool of a source, if it has one.
    pub(super) fn add(
        &mut self,
        source: &TaskclusterSource,
        name: &WorkerIdentity,
        api: &Api,
        environment: &Environment,
    ) -> Result<(), Failure> {
        let Some(section) = &source.worker_pool else { return Ok(()) };
        let seed = uuid::Uuid::new_v4().as_u64_pair().0;
        let mut pool = WorkerPool::new(api.clone(), source.task_queue.to_string(), name.group.clone(), name.id.clone());
        let mut member = PoolMember::with_credentials(seed);
        if let Some((provider, file)) = section.provider_id.clone().zip(section.static_secret_file.as_ref()) {
            let secret = file.load("a static secret", environment)?;
            pool = pool.registering(provider, secret).map_err(|error| Failure::from_error(Exit::Config, &error))?;
            member = PoolMember::unregistered(seed);
        }
        let (pool, last_error) = (Arc::new(pool), String::new());
        self.0.push(Membership { pool, member, remove_on_exit: section.remove_on_exit, last_error });
        Ok(())
    }

    /// Registers, and asks once whether the worker is needed, before it claims anything.
    ///
    /// # Errors
    ///
    /// [`Exit::Denied`] if a pool refuses the worker, [`Exit::Unreachable`] without an answer in time.
    pub(super) async fn join(&mut self, control: &Control) -> Result<(), Failure> {
        for membership in &mut self.0 {
            let registering = membership.next_decision(PoolMember::is_registered);
            let refused = timeout(POOL_REGISTRATION_TIMEOUT, registering).await.map(|refused| refused.is_some());
            if refused != Ok(false) {
                let exit = if refused.is_ok() { Exit::Denied } else { Exit::Unreachable };
                let why = &membership.last_error;
                return Err(Failure::new(exit, format!("cannot register in the worker pool: {why}")));
            }
            if let Ok(Some(decision)) = timeout(POOL_CHECK_TIMEOUT, membership.call()).await {
                control.decide_in_pool(decision).await;
            }
        }
        Ok(())
    }

    /// Alerts become errors of the pools, if they are given.
    pub(super) async fn run(&mut self, control: &Control, alerts: Option<mpsc::Receiver<AlertLine>>) -> Infallible {
        let pools: Vec<_> = self.0.iter().map(|membership| Arc::clone(&membership.pool)).collect();
        let members = join_all(self.0.iter_mut().map(async |membership| {
            while let Some(decision) = membership.next_decision(|member| member.next_call().is_none()).await {
                control.decide_in_pool(decision).await;
            }
        }));
        let reports = or_pending(alerts.map(|alerts| report_alerts(&pools, alerts)));
        tokio::join!(members, reports);
        std::future::pending().await
    }

    /// Reports a failure, or removes a worker that will not come back.
    pub(super) async fn leave(&self, ended: &ExitResult) {
        let is_final = matches!(ended, Ok(Exit::Idle | Exit::LimitReached | Exit::NotNeeded | Exit::HostTerminating));
        let leaving = self.0.iter().map(async |Membership { pool, remove_on_exit, .. }| match ended {
            Ok(_) if *remove_on_exit && is_final => pool.remove().await,
            Ok(_) => Ok(()),
            Err(failure) => pool.report_error("worker failed", &failure.message).await,
        });
        for left in join_all(leaving).await {
            left.unwrap_or_else(|error| tracing::warn!("{error}"));
        }
    }
}

impl Membership {
    /// Makes calls until one is answered by a decision; `None` once `is_done`.
    async fn next_decision(&mut self, is_done: fn(&PoolMember) -> bool) -> Option<PoolDecision> {
        while !is_done(&self.member) {
            if let Some(decision) = self.call().await {
                return Some(decision);
            }
        }
        None
    }

    /// Makes the next call when it is due.
    async fn call(&mut self) -> Option<PoolDecision> {
        let (call, at) = (self.member.next_call()?, self.member.next_deadline()?);
        let clock = Clock::boot();
        clock.sleep_until(at).await;
        let sent_at = clock.now();
        let error = match self.pool.call(call).await {
            Ok(answer) => return self.member.on_answer(answer, sent_at, clock.now()),
            Err(error) => error,
        };
        let decision = self.member.on_refusal(call, error.refusal, clock.now());
        if decision.is_some() {
            tracing::error!(
                alert = "registration-refused",
                "[alert operator] {error}; check that the worker was created in its pool with this provider and secret, and has not \
                 expired. It claims nothing more, and exits when its credentials expire at the latest"
            );
        } else {
            tracing::warn!("{error}; the worker goes on");
        }
        self.last_error = error.message;
        decision
    }
}

async fn report_alerts(pools: &[Arc<WorkerPool>], mut alerts: mpsc::Receiver<AlertLine>) {
    let mut reports = AlertReports::NONE;
    while let Some(AlertLine { alert, message }) = alerts.recv().await {
        if reports.is_due(&alert, Clock::boot().now()) {
            for failed in join_all(pools.iter().map(|pool| pool.report_error(&alert, &message))).await {
                failed.unwrap_or_else(|error| tracing::warn!("{error}"));
            }
        }
    }
}
