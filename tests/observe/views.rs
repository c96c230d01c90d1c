//! Workers as they may look, and a server that shows them.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use journeyman::console::app::Console;
use journeyman::console::http::SnapshotFn;
use journeyman::console::http::worker::serve;
use journeyman::control::WorkerStatusReply;
use journeyman::worker::counters::{OutcomeCounts, SourceCounts, WorkerCounts};
use journeyman::worker::status::{
    ActivityStatus, BlockedReason, ClaimStatus, HostStatus, LifecycleState, Note, NoticeStatus, RecentResult,
    SidecarSummary, SourceError, SourceStatus, WorkerStatus,
};
use journeyman_platform::host::termination_notice::WatchStatus;
use journeyman_platform::http::{Exposure, HttpListener};
use tokio::task::JoinSet;

/// A worker with two sources that holds nothing.
const OUTCOMES: OutcomeCounts = OutcomeCounts {
    completed: 112,
    failed: 6,
    worker_shutdown: 1,
    malformed_payload: 2,
    resource_unavailable: 0,
    internal_error: 0,
    intermittent_task: 0,
    deferred: 0,
    canceled: 0,
    deadline_exceeded: 0,
    superseded: 0,
    unconfirmed: 0,
    lost: 0,
};

pub(crate) fn idle() -> WorkerStatusReply {
    let source = |name: &str, what: &str| SourceStatus {
        name: name.to_owned(),
        description: what.to_owned(),
        state: "asked".to_owned(),
        failing: false,
        polled_seconds_ago: Some(4.2),
        last_received_seconds_ago: None,
        next_poll_in_seconds: None,
        blocked_message: None,
        error: None,
        counts: SourceCounts { polls: 17, ..SourceCounts::default() },
        storage_error: None,
        durations: Default::default(),
        foreign_claims: 0,
        quarantined_until: None,
        clock_skew_seconds: Some(0),
        metrics: Default::default(),
    };
    let view = WorkerStatus {
        sidecars: Vec::new(),
        watches: vec![WatchStatus { provider: "aws".to_owned(), error: None }],
        activity: None,
        state: LifecycleState::Running,
        blocked_message: None,
        blocked_reason: None,
        note: None,
        uptime_seconds: 11_520.5,
        capacity: 4,
        launched: 0,
        sources: vec![
            source("ci", "prov/linux-large at tc.example.com, claim-work"),
            source("nightly", "prov/nightly at tc.example.com, azure"),
        ],
        claims: Vec::new(),
        cleanup_pending: Vec::new(),
        last_hour: OUTCOMES,
        recent_results: vec![RecentResult {
            task: "cZ3SbArXTPSVFNUvaOlin3".to_owned(),
            run: 1,
            name: Some(HOSTILE.to_owned()),
            source: "ci".to_owned(),
            outcome: "exception (malformed-payload)".to_owned(),
            reason: Some(format!("the payload is malformed; no task code was run: {HOSTILE}")),
            held_seconds: 4.0,
            seconds_ago: 61.0,
        }],
        counts: WorkerCounts::default(),
        host: HostStatus {
            disk_free: Some(212 << 30),
            disk_min: 512 << 20,
            memory_free: Some(9 << 30),
            memory_min: 64 << 20,
        },
        containment: "cgroup-kill".to_owned(),
        notice: None,
        recovered: None,
        spans: Some(journeyman::worker::trace_recorder::SpanCounts { exported: 41, dropped: 2 }),
        next: None,
        hints: Vec::new(),
    };
    WorkerStatusReply {
        version: "0.3.0".into(),
        id: "ip-10-0-3-7-i-0abc".into(),
        group: "eu-central-1".into(),
        pid: 4121,
        snapshot: view,
    }
}

fn task(name: &str, source: &str, held: f64, left: f64, progress: Option<&str>) -> ClaimStatus {
    ClaimStatus {
        task: name.to_owned(),
        run: 0,
        name: Some(format!("build of {name}")),
        source: source.to_owned(),
        state: "running".to_owned(),
        progress: progress.map(str::to_owned),
        held_seconds: held,
        lease_left_seconds: Some(left),
        lease_seconds: Some(1_200.0),
        reclaimed_seconds_ago: (held > 900.0).then_some(128.0),
        log_bytes: 2_345_678,
        memory_bytes: Some(430 << 20),
        trace_id: Some("0af7651916cd43dd8448eb211c80319c".to_owned()),
    }
}

/// Three tasks; one has a short lease, and one says what a task that means ill would say.
pub(crate) fn running() -> WorkerStatusReply {
    let mut status = idle();
    let view = &mut status.snapshot;
    view.claims = vec![
        task("fN1SbArXTPSVFNUvaOlinQ", "ci", 2467.0, 21.0, Some("compile 63 %")),
        task("aX9SbArXTPSVFNUvaOlin1", "ci", 201.0, 999.0, Some(HOSTILE)),
        task("bY2SbArXTPSVFNUvaOlin2", "nightly", 4.0, 1196.0, None),
    ];
    view.next = Some("reclaim fN1SbArXTPSVFNUvaOlinQ/0 in 3s".into());
    view.sources[0].last_received_seconds_ago = Some(201.0);
    let sources = SourceCounts { polls: 900, claims: 123, reclaims: 31, outcomes: OUTCOMES, ..SourceCounts::default() };
    view.sources[0].counts = sources;
    view.counts =
        WorkerCounts { sources, artifacts: 240, log_bytes: 1 << 30, config_reloads: 1, ..WorkerCounts::default() };
    status
}

/// What a page must show as text.
pub(crate) const HOSTILE: &str =
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">";

pub(crate) fn paused() -> WorkerStatusReply {
    let mut status = idle();
    status.snapshot.state = LifecycleState::Paused;
    status.snapshot.blocked_reason = Some(BlockedReason::Paused);
    status.snapshot.blocked_message = Some("paused for 41m07s".into());
    status.snapshot.note = Some(Note { by: "ana".into(), text: "kernel update".into() });
    status
}

pub(crate) fn draining() -> WorkerStatusReply {
    let mut status = running();
    status.snapshot.state = LifecycleState::Draining;
    status.snapshot.blocked_reason = Some(BlockedReason::Stopping);
    status.snapshot.blocked_message = Some("draining; what still runs is handed back in 56m02s".into());
    status.snapshot.note = Some(Note::of("a notice"));
    status.snapshot.notice = Some(NoticeStatus { seconds_ago: 12.0, last_claim_ended_after_seconds: Some(3.5) });
    status.snapshot.counts.notices = 1;
    status.snapshot.counts.notices_aws = 1;
    status.snapshot.sources[0].metrics.insert("answers".to_owned(), 12);
    status.snapshot.sidecars = vec![SidecarSummary {
        name: "echo".to_owned(),
        up: true,
        message: "it answers at /run/echo.sock".to_owned(),
        restarts: 2,
        log: None,
    }];
    status.snapshot.activity =
        Some(ActivityStatus { exchange: "core-activity-xchg".to_owned(), reports: 7, failures: 1, error: None });
    status
}

/// One source answers with a sentence of two lines, the other has not been asked.
pub(crate) fn troubled() -> WorkerStatusReply {
    let mut status = idle();
    let source = &mut status.snapshot.sources[0];
    source.failing = true;
    source.error = Some(SourceError {
        message: "poll: 502 from https://tc.example.com/api/queue/v1/claim-work:\n\"bad gateway\" \\o/".into(),
        seconds_ago: 8.0,
        consecutive: 3,
    });
    source.next_poll_in_seconds = Some(2.0);
    source.counts.polls_failed = 3;
    source.counts.refusals = 3;
    status.snapshot.sources[1].polled_seconds_ago = None;
    status.snapshot.hints = vec!["ci has been in trouble for 8s".into()];
    status
}

/// Every one of them, with a word for it.
pub(crate) fn all() -> [(&'static str, WorkerStatusReply); 5] {
    [("running", running()), ("idle", idle()), ("paused", paused()), ("draining", draining()), ("trouble", troubled())]
}

/// What is shown next, and what after that.
struct Shown<S> {
    once: Option<S>,
    then: Option<S>,
    snapshots: usize,
}

/// Serves the status of a worker or a controller, which a test can change.
pub(crate) struct Server<S> {
    pub(crate) address: SocketAddr,
    shown: Arc<Mutex<Shown<S>>>,
    _serving: JoinSet<()>,
}

impl Server<WorkerStatusReply> {
    pub(crate) async fn start(status: WorkerStatusReply) -> Self {
        Self::serving(Some(status), |listener, snapshot| serve(listener, snapshot, Vec::new(), Console::default()))
            .await
    }

    /// One whose worker does not answer.
    pub(crate) async fn stuck() -> Self {
        Self::serving(None, |listener, _| {
            let snapshot = Arc::new(|| Box::pin(std::future::pending()) as _);
            serve(listener, snapshot, Vec::new(), Console::default())
        })
        .await
    }
}

impl<S: Clone + Send + 'static> Server<S> {
    pub(crate) async fn serving<F: Future<Output = Infallible> + Send + 'static>(
        status: Option<S>,
        serve: impl FnOnce(HttpListener, Arc<SnapshotFn<S>>) -> F,
    ) -> Self {
        let listener = HttpListener::listen("127.0.0.1:0".parse().unwrap(), Exposure::Loopback).await.expect("a port");
        let address = listener.address().expect("an address");
        let shown = Arc::new(Mutex::new(Shown { once: None, then: status, snapshots: 0 }));
        let shared = Arc::clone(&shown);
        let snapshot: Arc<SnapshotFn<S>> = Arc::new(move || {
            let mut shown = shared.lock().unwrap();
            shown.snapshots += 1;
            let status = shown.once.take().or_else(|| shown.then.clone());
            Box::pin(std::future::ready(status))
        });
        let serving = serve(listener, snapshot);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move { match serving.await {} });
        Self { address, shown, _serving: tasks }
    }

    pub(crate) fn show(&self, status: Option<S>) {
        *self.shown.lock().unwrap() = Shown { once: None, then: status, snapshots: 0 };
    }

    pub(crate) fn snapshots(&self) -> usize {
        self.shown.lock().unwrap().snapshots
    }

    /// Shows it once; after that the worker has exited.
    pub(crate) fn show_once(&self, status: S) {
        *self.shown.lock().unwrap() = Shown { once: Some(status), then: None, snapshots: 0 };
    }
}
