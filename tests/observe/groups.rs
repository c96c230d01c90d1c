//! Controllers as they may look, and the page that shows them.

use std::sync::Arc;

use journeyman::console::http::controller::serve;
use journeyman::control::controller_api::ControllerStatusReply;
use journeyman_platform::http::BearerToken;
use journeyman_services::controller::status::{
    BrokerStatus, CounterValues, ErrorStatus, GroupPhase, GroupStatus, PoolStatus, Role, WorkerActivity, WorkerCounts,
    WorkerStatus,
};

use crate::observe::views::{HOSTILE, Server};
use crate::support::http::get;

fn status(pools: Vec<PoolStatus>) -> ControllerStatusReply {
    ControllerStatusReply { version: "0.3.0".into(), pid: 4121, uptime_seconds: 11_520.5, pools }
}

fn pool(name: &str, role: Role) -> PoolStatus {
    PoolStatus {
        name: name.to_owned(),
        role,
        seconds_in_role: 3_062.0,
        broker: BrokerStatus {
            address: "amqp://mq.example.com:5672/%2f".to_owned(),
            error: None,
            consecutive_failures: 0,
        },
        max_total: None,
        paused: None,
        starts_workers: true,
        driver_error: None,
        workers: WorkerCounts::default(),
        groups: Vec::new(),
        external_demands: Vec::new(),
        orphans_held: 0,
        counters: CounterValues::default(),
        last_error: None,
    }
}

fn group(key: &str, phase: GroupPhase, workers: &[WorkerActivity]) -> GroupStatus {
    let member = |(at, doing): (usize, &WorkerActivity)| WorkerStatus {
        id: format!("8a6f3c1e-5b0d-4c1f-9a51-{key:0>8.8}{at:04}"),
        state: *doing,
        age_seconds: 62.0,
        detail: None,
    };
    GroupStatus {
        key: key.to_owned(),
        phase,
        next_phase_seconds: (phase != GroupPhase::Deleting).then_some(571.0),
        ready: Some(0),
        unacknowledged: None,
        workers: workers.iter().copied().collect(),
        worker_list: workers.iter().enumerate().map(member).collect(),
        wanted: Some(u32::try_from(workers.len()).unwrap()),
        reasons: vec!["the load needs 0".to_owned(), "raised to min = 1".to_owned()],
        waiting_for: None,
        restart_backoff_seconds: None,
        paused: None,
        scale_override: None,
        consecutive_failures: 0,
        failing: false,
        last_exit: None,
    }
}

/// Groups in every phase, and two pools.
pub(crate) fn busy() -> ControllerStatusReply {
    let mut core = pool("core", Role::Active);
    let mut warm = group(
        "timetable-42",
        GroupPhase::Active,
        &[WorkerActivity::Busy, WorkerActivity::Busy, WorkerActivity::Starting],
    );
    warm.ready = Some(5);
    warm.reasons = vec!["the load needs 5".to_owned(), "limited by max = 3".to_owned()];
    let mut unbound = group("17", GroupPhase::Unbound, &[WorkerActivity::Idle]);
    unbound.next_phase_seconds = Some(83.0);
    let mut going = group("9", GroupPhase::Deleting, &[WorkerActivity::Stopping]);
    (going.wanted, going.reasons) = (Some(0), vec!["the group is not needed".to_owned()]);
    going.waiting_for = Some("the queue is deleted after its last worker exits".to_owned());
    core.groups = vec![unbound, going, warm];
    core.workers = WorkerCounts { starting: 1, idle: 1, busy: 2, stopping: 1 };
    (core.max_total, core.orphans_held) = (Some(10), 2);
    core.counters = CounterValues {
        orphans_forwarded: 170,
        dead_letters: 3,
        poison_requests: 1,
        activity_reports: 4_031,
        ..CounterValues::default()
    };
    (core.counters.workers_started, core.counters.workers_failed) = (11, 1);
    let mut elsewhere = pool("elsewhere", Role::Active);
    elsewhere.starts_workers = false;
    let mut plain = group("a", GroupPhase::Active, &[]);
    (plain.wanted, plain.reasons, plain.ready) = (None, Vec::new(), Some(1));
    elsewhere.groups = vec![plain];
    status(vec![core, elsewhere])
}

/// Workers that do not last, and a key that means ill.
pub(crate) fn failing() -> ControllerStatusReply {
    let mut core = pool("core", Role::Active);
    let mut fails = group(HOSTILE, GroupPhase::Active, &[]);
    (fails.ready, fails.wanted, fails.consecutive_failures, fails.failing) = (Some(7), Some(1), 6, true);
    fails.restart_backoff_seconds = Some(40.0);
    fails.last_exit = Some(ErrorStatus {
        message: "exit status: 1; log: 6f4dd4e7-5d0f-4f0e-8f37-21c2d1a2ab00.log".to_owned(),
        seconds_ago: 12.0,
    });
    let mut slow = group("", GroupPhase::Active, &[WorkerActivity::Starting]);
    (slow.consecutive_failures, slow.restart_backoff_seconds) = (1, None);
    slow.last_exit = Some(ErrorStatus { message: "signal: 9 (SIGKILL); log: a.log".to_owned(), seconds_ago: 75.0 });
    slow.waiting_for = Some("its queue is made again".to_owned());
    core.groups = vec![slow, group("well", GroupPhase::Active, &[WorkerActivity::Idle]), fails];
    core.workers = WorkerCounts { starting: 1, idle: 1, busy: 0, stopping: 0 };
    core.counters = CounterValues {
        workers_started: 11,
        workers_failed: 7,
        queue_operation_failures: 2,
        ..CounterValues::default()
    };
    core.last_error =
        Some(ErrorStatus { message: "queue operation for key 42: timed out after 30s".to_owned(), seconds_ago: 75.0 });
    status(vec![core])
}

/// One that another controller keeps from work, and one without a broker.
pub(crate) fn standby() -> ControllerStatusReply {
    let mut far = pool("far", Role::Disconnected);
    far.broker.error = Some("connection refused (os error 111)".to_owned());
    (far.broker.consecutive_failures, far.counters.broker_disconnects) = (4, 1);
    far.last_error =
        Some(ErrorStatus { message: "the broker: connection refused (os error 111)".into(), seconds_ago: 3.0 });
    status(vec![pool("core", Role::Standby), far])
}

impl Server<ControllerStatusReply> {
    async fn controller(status: ControllerStatusReply) -> Self {
        Self::with_commands(status, None, crate::observe::orders::accepting(Arc::default())).await
    }

    pub(crate) async fn with_commands(
        status: ControllerStatusReply,
        token: Option<BearerToken>,
        commands: axum::Router,
    ) -> Self {
        Self::serving(Some(status), |listener, snapshot| serve(listener, snapshot, token, commands)).await
    }
}

#[tokio::test]
async fn a_page_of_a_controller_escapes_keys_and_is_served_with_its_policy() {
    let server = Server::controller(failing()).await;
    let page = get(server.address, "/").await;
    assert!(page.head.contains("content-security-policy: default-src 'none'; style-src 'sha256-"), "{}", page.head);
    assert!(page.body.contains("<title>1 failing · core</title>"), "{}", page.body);
    assert!(page.body.contains("&lt;script&gt;document.title"), "{}", page.body);
    assert!(!page.body.contains("<script>document.title"), "{}", page.body);
}

#[tokio::test]
async fn a_page_of_many_groups_shows_failing_ones_first_and_counts_the_rest() {
    let mut many = failing();
    let of = |number: u32| group(&format!("quiet-{number}"), GroupPhase::Active, &[WorkerActivity::Idle]);
    many.pools[0].groups.splice(0..0, (0..1_000).map(of));
    let server = Server::controller(many).await;
    let page = get(server.address, "/").await.body;
    assert!(page.contains("workers failed in a row: 6") && page.contains("and 803 more"), "{}", page.len());
    assert!(page.len() < 400_000, "{}", page.len());
}
