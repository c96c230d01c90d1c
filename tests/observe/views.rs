//! Workers as they may look, and a server that shows them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use journeyman::control::Status;
use journeyman::observe::http::{Door, Look, Reach, serve};
use journeyman::worker::counters::{Counts, Ends, SourceCounts};
use journeyman::worker::view::{
    Activity, Blocked, Host, Next, Note, Notice, Outcomes, Service, Source, SourceError, Spot, State, Task, View,
};
use tokio::task::JoinSet;

/// A worker with two sources that holds nothing.
pub(crate) fn idle() -> Status {
    let source = |name: &str, what: &str| Source {
        name: name.to_owned(),
        what: what.to_owned(),
        step: "asked".to_owned(),
        in_trouble: false,
        polled_seconds_ago: Some(4.2),
        brought_seconds_ago: None,
        next_poll_in_seconds: None,
        error: None,
        counts: SourceCounts { polls: 17, ..SourceCounts::default() },
        others: 0,
        clock_ahead_seconds: Some(0),
        tallies: Default::default(),
    };
    let view = View {
        services: Vec::new(),
        watches: vec![Spot { provider: "aws".to_owned(), heard: true, trouble: None, seconds: 5.0 }],
        activity: None,
        state: State::Running,
        not_claiming: None,
        blocked: None,
        note: None,
        uptime_seconds: 11_520.5,
        capacity: 4,
        asked: 4,
        sources: vec![
            source("ci", "prov/linux-large at tc.example.com, claim-work"),
            source("nightly", "prov/nightly at tc.example.com, azure"),
        ],
        tasks: Vec::new(),
        kept: Vec::new(),
        last_hour: Outcomes { completed: 112, failed: 6, exceptions: 2, handed_back: 1, superseded: 0, lost: 0 },
        counts: Counts::default(),
        host: Host {
            disk_free: Some(212 << 30),
            disk_least: 512 << 20,
            memory_free: Some(9 << 30),
            memory_least: 64 << 20,
        },
        containment: "cgroup-kill".to_owned(),
        notice: None,
        recovered: None,
        spans: Some(journeyman::worker::record::Spans { exported: 41, dropped: 2 }),
        next: None,
        hints: Vec::new(),
    };
    Status { version: "0.3.0".into(), id: "ip-10-0-3-7-i-0abc".into(), group: "eu-central-1".into(), pid: 4121, view }
}

fn task(name: &str, source: &str, held: f64, left: f64, progress: Option<&str>) -> Task {
    Task {
        task: name.to_owned(),
        run: 0,
        source: source.to_owned(),
        step: "running".to_owned(),
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
pub(crate) fn running() -> Status {
    let mut status = idle();
    let view = &mut status.view;
    view.tasks = vec![
        task("fN1SbArXTPSVFNUvaOlinQ", "ci", 2467.0, 21.0, Some("compile 63 %")),
        task("aX9SbArXTPSVFNUvaOlin1", "ci", 201.0, 999.0, Some(HOSTILE)),
        task("bY2SbArXTPSVFNUvaOlin2", "nightly", 4.0, 1196.0, None),
    ];
    view.asked = 1;
    view.next = Some(Next { what: "reclaim fN1SbArXTPSVFNUvaOlinQ/0".into(), in_seconds: 3.0 });
    view.sources[0].brought_seconds_ago = Some(201.0);
    let ends = Ends { completed: 112, failed: 6, worker_shutdown: 1, malformed_payload: 2, ..Ends::default() };
    view.sources[0].counts = SourceCounts { polls: 900, claims: 123, reclaims: 31, ends, ..SourceCounts::default() };
    view.counts =
        Counts { polls: 917, claims: 123, artifacts: 240, log_bytes: 1 << 30, reloads: 1, ..Counts::default() };
    status
}

/// What a page must show as text.
pub(crate) const HOSTILE: &str =
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">";

pub(crate) fn paused() -> Status {
    let mut status = idle();
    status.view.state = State::Paused;
    status.view.blocked = Some(Blocked::Paused);
    status.view.not_claiming = Some("paused for 41m07s".into());
    status.view.note = Some(Note { by: "ana".into(), text: "kernel update".into() });
    status
}

pub(crate) fn draining() -> Status {
    let mut status = running();
    status.view.state = State::Draining;
    status.view.blocked = Some(Blocked::Draining);
    status.view.not_claiming = Some("draining; what still runs is handed back in 56m02s".into());
    status.view.note = Some(Note::of("a notice"));
    status.view.notice = Some(Notice { seconds_ago: 12.0, to_last_end_seconds: Some(3.5) });
    status.view.counts.notices = 1;
    status.view.counts.notices_aws = 1;
    status.view.sources[0].tallies.insert("answers".to_owned(), 12);
    status.view.services = vec![Service {
        name: "echo".to_owned(),
        up: true,
        what: "it answers at /run/echo.sock".to_owned(),
        restarts: 2,
        log: None,
    }];
    status.view.activity =
        Some(Activity { exchange: "core-activity-xchg".to_owned(), reports: 7, failures: 1, error: None });
    status
}

/// One source answers with a sentence of two lines, the other has not been asked.
pub(crate) fn troubled() -> Status {
    let mut status = idle();
    let source = &mut status.view.sources[0];
    source.in_trouble = true;
    source.error = Some(SourceError {
        text: "poll: 502 from https://tc.example.com/api/queue/v1/claim-work:\n\"bad gateway\" \\o/".into(),
        seconds_ago: 8.0,
        in_a_row: 3,
    });
    source.next_poll_in_seconds = Some(2.0);
    source.counts.polls_failed = 3;
    source.counts.refusals = 3;
    status.view.sources[1].polled_seconds_ago = None;
    status.view.hints = vec!["ci has been in trouble for 8s".into()];
    status
}

/// Every one of them, with a word for it.
pub(crate) fn all() -> [(&'static str, Status); 5] {
    [("running", running()), ("idle", idle()), ("paused", paused()), ("draining", draining()), ("trouble", troubled())]
}

/// What is shown next, and what after that.
#[derive(Default)]
struct Shown {
    once: Option<Status>,
    then: Option<Status>,
    looks: usize,
}

/// Serves what it is told to show.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    shown: Arc<Mutex<Shown>>,
    _serving: JoinSet<()>,
}

impl Server {
    pub(crate) async fn start(status: Status) -> Self {
        let door = Door::listen("127.0.0.1:0".parse().unwrap(), Reach::Loopback).await.expect("a port");
        let address = door.address().expect("it has one");
        let shown = Arc::new(Mutex::new(Shown { once: None, then: Some(status), looks: 0 }));
        let seen = Arc::clone(&shown);
        let look: Arc<Look> = Arc::new(move || {
            let mut seen = seen.lock().unwrap();
            seen.looks += 1;
            let status = seen.once.take().or_else(|| seen.then.clone());
            Box::pin(std::future::ready(status))
        });
        Self::with(address, shown, door, look)
    }

    /// One whose worker does not answer.
    pub(crate) async fn stuck() -> Self {
        let door = Door::listen("127.0.0.1:0".parse().unwrap(), Reach::Loopback).await.expect("a port");
        let address = door.address().expect("it has one");
        let look: Arc<Look> = Arc::new(|| Box::pin(std::future::pending()));
        Self::with(address, Arc::default(), door, look)
    }

    fn with(address: SocketAddr, shown: Arc<Mutex<Shown>>, door: Door, look: Arc<Look>) -> Self {
        let mut serving = JoinSet::new();
        serving.spawn(async move { match serve(door, look).await {} });
        Self { address, shown, _serving: serving }
    }

    pub(crate) fn show(&self, status: Option<Status>) {
        *self.shown.lock().unwrap() = Shown { once: None, then: status, looks: 0 };
    }

    /// How often somebody has looked.
    pub(crate) fn looks(&self) -> usize {
        self.shown.lock().unwrap().looks
    }

    /// Shows it to whoever looks next; after that the worker has exited.
    pub(crate) fn show_once(&self, status: Status) {
        *self.shown.lock().unwrap() = Shown { once: Some(status), then: None, looks: 0 };
    }
}
