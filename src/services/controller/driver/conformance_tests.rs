//! The contract of drivers. `subprocess` and `exec` start real processes; the others run against stand-ins that follow the
//! documentation.

mod fault_tests;
mod kubernetes_tests;
mod real_kubernetes_tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::timeout;

use super::*;
use crate::controller::config::{DockerDriverConfig, SystemdDriverConfig};
use journeyman_platform::settings::values::{File, Span};

/// A worker that behaves as its key says.
pub(super) const WORKER: &str = r#"#!/bin/sh
echo "hello from $WORKER_ID"
case "$WORKER_KEY" in
dies*) echo "goodbye"; exit 3 ;;
stays*) trap '' TERM ;;
wraps*) (trap '' TERM; echo >"$SEEN/$WORKER_ID.up"; while [ ! -e "$SEEN/go" ]; do sleep 0.05; done; echo >"$SEEN/$WORKER_ID.done") & ;;
strays*) setsid sh -c 'echo $$ >"$SEEN/$WORKER_ID.stray"; exec sleep 1000' & ;;
lingers*) trap 'echo told >>"$SEEN/$WORKER_ID.told"' TERM; trap 'echo last >>"$SEEN/$WORKER_ID.told"' URG ;;
esac
exec 3>&1
printf '%s' "$WORKER_KEY" >"$SEEN/$WORKER_ID"
# One that a failed test has left ends when the folder is gone.
while [ -d "$SEEN" ]; do sleep 0.05; done
"#;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);
const GRACE: Duration = Duration::from_millis(200);

pub(super) struct Fixture {
    pub(super) folder: tempfile::TempDir,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().expect("a folder") };
        std::fs::create_dir(place.path().join("seen")).expect("a folder");
        std::fs::write(place.path().join("worker"), WORKER).expect("it is written");
        place
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn test_pool(&self, name: &'static str, settings: PoolConfig) -> TestPool {
        let state_dir = File(self.path().join("pools"));
        TestPool { name, settings: PoolConfig { state_dir, termination_grace: Span(GRACE), ..settings } }
    }

    fn processes(&self, name: &'static str, script: &str) -> TestPool {
        self.test_pool(
            name,
            PoolConfig { command: vec!["/bin/sh".to_owned(), script.to_owned()], ..PoolConfig::default() },
        )
    }
}

#[derive(Clone)]
pub(super) struct TestPool {
    name: &'static str,
    settings: PoolConfig,
}

impl TestPool {
    fn folder(&self) -> PathBuf {
        pool_dir(self.name, &self.settings)
    }

    fn with_long_grace(mut self) -> Self {
        self.settings.termination_grace = Span(TEST_TIMEOUT);
        self
    }
}

struct DriverUnderTest {
    handle: DriverHandle,
    /// Workers whose exit was reported.
    ended: BTreeSet<String>,
    /// Workers whose exit was reported to the previous controller, which may not have removed them.
    ended_before: BTreeSet<String>,
}

impl DriverUnderTest {
    fn new(config: &TestPool) -> Self {
        let mut handle =
            DriverHandle::open(config.name, &config.settings, Clock::boot()).expect("it opens").expect("a driver");
        handle.activate();
        Self { handle, ended: BTreeSet::new(), ended_before: BTreeSet::new() }
    }

    /// The controller is killed, and the next one starts.
    async fn restart(self, config: &TestPool) -> Self {
        let Self { mut handle, mut ended, mut ended_before } = self;
        if let Some(mut active) = handle.active.take() {
            active.calls.shutdown().await;
        }
        drop(handle);
        ended_before.append(&mut ended);
        Self { ended_before, ..Self::new(config) }
    }

    fn check_changes(&mut self, changes: Result<Vec<WorkerChange>, DriverError>) -> Vec<WorkerChange> {
        let mut changes = changes.expect("it can say who is there");
        changes.retain(|change| match change {
            WorkerChange::Exited { id, .. } => {
                assert!(self.ended.insert(id.clone()), "{id} ends once");
                !self.ended_before.remove(id)
            }
            WorkerChange::Discovered { .. } => true,
        });
        changes
    }

    fn is_stopping(&self, id: &str) -> bool {
        self.handle.reconciler.worker(id).is_some_and(KnownWorker::is_stopping)
    }

    async fn next_event(&mut self) -> DriverEvent {
        timeout(TEST_TIMEOUT, self.handle.next_event()).await.expect("an event")
    }

    /// Lists at once. Returns whether an earlier list is still running.
    fn request_list(&mut self) -> bool {
        let active = self.handle.active.as_mut().expect("it is active");
        active.list_ticks.reset_immediately();
        active.listing_since.is_some()
    }

    async fn list_changes(&mut self) -> Vec<WorkerChange> {
        let (mut is_stale, mut all) = (self.request_list(), Vec::new());
        loop {
            match self.next_event().await {
                DriverEvent::Listed(changes) => {
                    all.extend(self.check_changes(changes));
                    if !std::mem::replace(&mut is_stale, false) {
                        return all;
                    }
                    self.request_list();
                }
                DriverEvent::ListSlow(_) => {}
                DriverEvent::Started(id) | DriverEvent::StartFailed { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    async fn next_change(&mut self) -> WorkerChange {
        let looking = async {
            loop {
                let mut changes = self.list_changes().await;
                if let Some(change) = changes.pop() {
                    assert_eq!(changes, []);
                    return change;
                }
            }
        };
        timeout(TEST_TIMEOUT, looking).await.expect("something changes")
    }

    async fn start(&mut self, assignment: WorkerSpec) -> Result<(), StartError> {
        let id = assignment.id.clone();
        self.handle.start(assignment);
        loop {
            match self.next_event().await {
                DriverEvent::Started(started) if started == id => return Ok(()),
                DriverEvent::StartFailed { id: refused, error: why } if refused == id => return Err(why),
                // It may have looked meanwhile.
                DriverEvent::Listed(changes) => assert_eq!(self.check_changes(changes), []),
                DriverEvent::ListSlow(_) => {}
                DriverEvent::Started(id) | DriverEvent::StartFailed { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    async fn wait_for_exit(&mut self, id: &str, was_told: bool) -> WorkerExit {
        match self.next_change().await {
            WorkerChange::Exited { id: ended, exit: end, requested: told, .. } => {
                assert_eq!((ended.as_str(), told), (id, was_told), "{end:?}");
                end
            }
            WorkerChange::Discovered { id: found, .. } => panic!("{id} is known: {found}"),
        }
    }
}

fn store(config: &TestPool) -> StateStore {
    StateStore::open(&config.folder()).expect("the state")
}

fn key(text: &str) -> Key {
    Key::new(text).expect("it is no longer than a key may be")
}

/// The worker writes its key into the directory `SEEN` once it runs.
pub(super) fn worker_spec(place: &Fixture, text: &str) -> WorkerSpec {
    let id = uuid::Uuid::new_v4().to_string();
    let variables = [
        ("WORKER_ID", id.clone()),
        ("WORKER_KEY", text.to_owned()),
        ("WORKER_AMQP_URI", "amqp://me:$ecret \"quoted\" \\ `x`@h/".to_owned()),
        ("SEEN", place.path().join("seen").display().to_string()),
    ];
    let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    WorkerSpec { id, key: key(text), variables }
}

/// A worker that cannot be started.
fn unstartable_spec(place: &Fixture) -> WorkerSpec {
    let mut assignment = worker_spec(place, "cannot");
    // No process has such a variable.
    assignment.variables.insert("CANNOT".to_owned(), "\0".to_owned());
    assignment
}

pub(super) async fn check_conformance(place: &Fixture, settings: PoolConfig) {
    let (core, other) = (place.test_pool("core", settings.clone()), place.test_pool("core-2", settings));
    let (mut site, mut stranger) = (DriverUnderTest::new(&core), DriverUnderTest::new(&other));
    assert_eq!(site.list_changes().await, [], "no worker runs");

    // A started worker runs with its variables, and is not reported as discovered.
    let idle = worker_spec(place, "lives");
    site.start(idle.clone()).await.expect("it is started");
    assert_eq!(site.list_changes().await, []);
    wait_until_up(place, &idle).await;

    // Any key is possible, also one that makes a name too long; the next controller finds each worker.
    let keys = ["", "-", "Ü/ %2d.", "a=b\u{1}\"$`\\'\n", &format!("lives{}", "é".repeat(120)), "lives"];
    let mut there = BTreeMap::from([(idle.id.clone(), idle.key.clone())]);
    for text in keys {
        let worker = worker_spec(place, text);
        site.start(worker.clone()).await.expect("it is started");
        there.insert(worker.id, worker.key);
    }
    let mut site = site.restart(&core).await;
    let found = site.list_changes().await.into_iter().map(|change| match change {
        WorkerChange::Discovered { id, key } => (id, key),
        WorkerChange::Exited { id, .. } => panic!("they go on: {id}"),
    });
    assert_eq!(found.collect::<BTreeMap<_, _>>(), there);
    assert_eq!(site.list_changes().await, [], "once");
    assert_eq!(stranger.list_changes().await, [], "those of another pool are none of its business");

    // Workers exit on request.
    for id in there.keys() {
        assert!(site.handle.stop(id));
    }
    let going = async {
        while !there.is_empty() {
            for change in site.list_changes().await {
                let WorkerChange::Exited { id, requested: true, .. } = &change else { panic!("they go: {change:?}") };
                assert!(there.remove(id).is_some(), "{id} goes once");
            }
        }
    };
    timeout(TEST_TIMEOUT, going).await.expect("they go");

    // A worker that ignores the request is killed.
    let stays = worker_spec(place, "stays");
    site.start(stays.clone()).await.expect("it is started");
    wait_until_up(place, &stays).await;
    assert!(site.handle.stop(&stays.id));
    site.wait_for_exit(&stays.id, true).await;

    // The next controller knows that a worker is stopping, and does not ask it again.
    let patient = core.clone().with_long_grace();
    let mut site = site.restart(&patient).await;
    let lingers = worker_spec(place, "lingers");
    site.start(lingers.clone()).await.expect("it is started");
    wait_until_up(place, &lingers).await;
    assert!(site.handle.stop(&lingers.id));
    let told = place.path().join("seen").join(format!("{}.told", lingers.id));
    let is_noted = || store(&core).stop_requests().expect("the state").contains(&lingers.id);
    let telling = async {
        while !(told.exists() && is_noted()) {
            assert_eq!(site.list_changes().await, []);
        }
    };
    timeout(TEST_TIMEOUT, telling).await.expect("it is told");
    let mut site = site.restart(&patient).await;
    let (id, key) = (lingers.id.clone(), lingers.key.clone());
    assert_eq!(site.list_changes().await, [WorkerChange::Discovered { id: id.clone(), key }]);
    assert!(site.is_stopping(&id));
    for _ in 0..3 {
        assert_eq!(site.list_changes().await, []);
    }
    assert_eq!(std::fs::read_to_string(&told).expect("it was told"), "told\n", "once");
    let mut site = site.restart(&core).await;
    assert_eq!(site.list_changes().await.len(), 1, "found");
    site.wait_for_exit(&id, true).await;

    // The exit of a worker is reported with its status and the end of its log.
    let dies = worker_spec(place, "dies");
    site.start(dies.clone()).await.expect("it is started");
    let end = site.wait_for_exit(&dies.id, false).await;
    assert!(end.reason.contains("exit status: 3"), "{end:?}");
    assert!(end.log_tail.contains("goodbye"), "{end:?}");

    // A worker that cannot be started fails to start, or exits.
    let cannot = unstartable_spec(place);
    if site.start(cannot.clone()).await.is_ok() {
        site.wait_for_exit(&cannot.id, false).await;
    }

    // An exited worker leaves no record and no file with a secret.
    let mut site = site.restart(&core).await;
    let left = || {
        let entries = std::fs::read_dir(core.folder()).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_own = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            !name.ends_with(".log") && !name.starts_with("state.db")
        };
        let files: Vec<_> = entries.filter(is_own).collect();
        (files, store(&core).workers().expect("the state"), store(&core).stop_requests().expect("the state"))
    };
    let forgetting = async {
        while left() != Default::default() {
            assert_eq!(site.list_changes().await, []);
        }
    };
    assert!(timeout(TEST_TIMEOUT, forgetting).await.is_ok(), "{:?}", left());
    assert_eq!(site.list_changes().await, []);
}

async fn wait_until_up(place: &Fixture, worker: &WorkerSpec) {
    let path = place.path().join("seen").join(&worker.id);
    let looking = async {
        while std::fs::read_to_string(&path).ok().as_deref() != Some(worker.key.as_str()) {
            tokio::task::yield_now().await;
        }
    };
    timeout(TEST_TIMEOUT, looking).await.expect("it is up");
}

mod real {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn processes_of_this_host_are_a_driver() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let settings = place.processes("", &worker).settings;
        check_conformance(&place, settings).await;
    }

    /// The process of a worker's stray, once it is there.
    async fn stray(place: &Fixture, worker: &WorkerSpec) -> String {
        let path = place.path().join("seen").join(format!("{}.stray", worker.id));
        let looking = async {
            loop {
                match std::fs::read_to_string(&path) {
                    Ok(pid) if pid.ends_with('\n') => return format!("/proc/{}/stat", pid.trim()),
                    Ok(_) | Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        timeout(TEST_TIMEOUT, looking).await.expect("it strays")
    }

    /// True if a process is there, and not just waited for.
    fn is_there(stat: &str) -> bool {
        let stat = std::fs::read_to_string(stat);
        stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| !state.starts_with(" Z")))
    }

    fn record(config: &TestPool, id: &str) -> crate::controller::state_store::WorkerRecord {
        let records = store(config).workers().expect("the state");
        records.into_iter().find(|record| record.id == id).expect("a record")
    }

    fn has_cgroups() -> bool {
        let probe = journeyman_platform::host::containment::WorkerCgroups::probe("conformance");
        if let Err(why) = &probe {
            assert!(std::env::var_os("CI").is_none(), "no cgroups: {why}");
            println!("MISSING: cgroups, so nothing was tested: {why}");
        }
        probe.is_ok()
    }

    fn execute(config: &TestPool, statement: &str) {
        let state = rusqlite::Connection::open(config.folder().join("state.db")).expect("the state");
        state.busy_timeout(TEST_TIMEOUT).expect("it is set");
        state.execute_batch(statement).expect("it is done");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_worker_puts_elsewhere_goes_with_it_whoever_sees_it_end() {
        if !has_cgroups() {
            return;
        }
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let pool = place.processes("core", &worker);
        let mut site = DriverUnderTest::new(&pool);
        for is_adopted in [false, true] {
            let strays = worker_spec(&place, "strays");
            site.start(strays.clone()).await.expect("it is started");
            let (stray, record) = (stray(&place, &strays).await, record(&pool, &strays.id));
            assert!(is_there(&stray));
            if is_adopted {
                site = site.restart(&pool).await;
                assert_eq!(site.list_changes().await.len(), 1, "it is found");
                let pid = record.process.and_then(|process| rustix::process::Pid::from_raw(process.pid));
                rustix::process::kill_process(pid.expect("a number"), rustix::process::Signal::KILL)
                    .expect("it is there");
            } else {
                assert!(site.handle.stop(&strays.id));
            }
            site.wait_for_exit(&strays.id, !is_adopted).await;
            let group = record.cgroup.expect("a cgroup");
            let going = async {
                while is_there(&stray) || group.exists() {
                    assert_eq!(site.list_changes().await, []);
                }
            };
            timeout(TEST_TIMEOUT, going).await.expect("nothing is left");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_stopped_shell_has_started_keeps_its_time() {
        if !has_cgroups() {
            return;
        }
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let pool = place.processes("core", &worker).with_long_grace();
        let mut site = DriverUnderTest::new(&pool);
        let seen = place.path().join("seen");
        let wraps = worker_spec(&place, "wraps");
        site.start(wraps.clone()).await.expect("it is started");
        let (up, done) = (seen.join(format!("{}.up", wraps.id)), seen.join(format!("{}.done", wraps.id)));
        timeout(TEST_TIMEOUT, async {
            while !up.exists() {
                tokio::task::yield_now().await
            }
        })
        .await
        .expect("it is up");
        assert!(site.handle.stop(&wraps.id));
        for _ in 0..3 {
            assert_eq!(site.list_changes().await, [], "it keeps running");
        }
        let (id, key) = (wraps.id.clone(), wraps.key.clone());
        let mut site = site.restart(&pool).await;
        assert_eq!(site.list_changes().await, [WorkerChange::Discovered { id: id.clone(), key }]);
        assert!(site.is_stopping(&id));
        assert_eq!(site.list_changes().await, []);
        assert!(!done.exists());
        std::fs::write(seen.join("go"), "").expect("it is written");
        site.wait_for_exit(&wraps.id, true).await;
        assert!(done.exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_list_that_fails_reports_no_exit() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let pool = place.processes("core", &worker);
        let mut site = DriverUnderTest::new(&pool);
        let goes = worker_spec(&place, "goes");
        site.start(goes.clone()).await.expect("it is started");
        wait_until_up(&place, &goes).await;
        assert_eq!(site.list_changes().await, []);
        execute(&pool, "ALTER TABLE worker RENAME TO hidden");
        let why = loop {
            site.request_list();
            if let DriverEvent::Listed(Err(DriverError(why))) = site.next_event().await {
                break why;
            }
        };
        assert!(why.contains("worker"), "{why}");
        execute(&pool, "ALTER TABLE hidden RENAME TO worker");
        while let DriverEvent::Listed(changes) = site.next_event().await {
            if let Ok(changes) = changes {
                assert_eq!(changes, [], "it was never taken for exited");
                break;
            }
        }
        assert!(site.handle.stop(&goes.id));
        site.wait_for_exit(&goes.id, true).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_worker_whose_start_was_interrupted_is_killed() {
        if !has_cgroups() {
            return;
        }
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let pool = place.processes("core", &worker);
        let lives = worker_spec(&place, "lives");
        let mut site = DriverUnderTest::new(&pool);
        site.start(lives.clone()).await.expect("it is started");
        wait_until_up(&place, &lives).await;
        drop(site);
        let started = record(&pool, &lives.id);
        let interrupted = crate::controller::state_store::WorkerRecord { process: None, ..started.clone() };
        store(&pool).put_worker(&interrupted).expect("the state");
        let mut site = DriverUnderTest::new(&pool);
        let killing = async {
            while !store(&pool).workers().expect("the state").is_empty() {
                assert_eq!(site.list_changes().await, []);
            }
        };
        timeout(TEST_TIMEOUT, killing).await.expect("its record is removed");
        assert!(!is_there(&format!("/proc/{}/stat", started.process.expect("a process").pid)));
    }

    /// On one thread, which gives the lock up only if the driver leaves it.
    #[tokio::test]
    async fn a7_a_state_that_does_not_answer_holds_up_nothing_else() {
        let place = Fixture::new();
        let script = place.path().join("ends");
        std::fs::write(&script, "exit 0\n").expect("it is written");
        let pool = place.processes("core", &script.display().to_string());
        let mut site = DriverUnderTest::new(&pool);
        assert_eq!(site.list_changes().await, []);
        let lock = rusqlite::Connection::open(pool.folder().join("state.db")).expect("it is opened");
        lock.execute_batch("BEGIN IMMEDIATE").expect("it is locked");
        let unlocking = async {
            for _ in 0..1000 {
                tokio::task::yield_now().await;
            }
            lock.execute_batch("COMMIT").expect("it is unlocked");
        };
        let worker = worker_spec(&place, "a");
        let (started, ()) = tokio::join!(site.start(worker.clone()), unlocking);
        started.expect("it waits for the lock");
        site.wait_for_exit(&worker.id, false).await;
    }

    /// A call that timed out on a slow disk may have sent it.
    #[tokio::test(flavor = "multi_thread")]
    async fn a7_a_stop_that_is_repeated_sends_one_term() {
        let place = Fixture::new();
        let pool = place.processes("core", &place.path().join("worker").display().to_string());
        let mut site = DriverUnderTest::new(&pool);
        let lingers = worker_spec(&place, "lingers");
        site.start(lingers.clone()).await.expect("it is started");
        wait_until_up(&place, &lingers).await;
        let told = place.path().join("seen").join(format!("{}.told", lingers.id));
        let wait_until_told = async |what: &str| {
            let telling = async {
                while !std::fs::read_to_string(&told).is_ok_and(|text| text.ends_with(what)) {
                    tokio::task::yield_now().await;
                }
            };
            timeout(TEST_TIMEOUT, telling).await.expect("it is told");
        };
        let stop = async |mode| {
            let stop = DriverCall::Stop(lingers.id.clone(), lingers.key.clone(), mode);
            Arc::clone(&site.handle.driver).call(stop, Arc::clone(&site.handle.store)).await;
        };
        for _ in 0..2 {
            stop(StopMode::Terminate).await;
            wait_until_told("told\n").await;
        }
        // A shell runs the traps of signals that wait in the order of their numbers.
        let process = record(&pool, &lingers.id).process.expect("a process");
        let group = rustix::process::Pid::from_raw(process.pid).expect("a number");
        rustix::process::kill_process_group(group, rustix::process::Signal::URG).expect("it is there");
        wait_until_told("last\n").await;
        stop(StopMode::Kill).await;
        assert_eq!(std::fs::read_to_string(&told).expect("it was told"), "told\nlast\n");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn c6_the_directory_of_a_worker_is_its_own_and_is_removed_when_it_has_ended() {
        let place = Fixture::new();
        let script = place.path().join("keeps");
        std::fs::write(
            &script,
            "mkdir -p $WORKER_DIR/a/b; chmod 500 $WORKER_DIR/a; echo $WORKER_DIR >\"$SEEN/$WORKER_ID\"; exit 3\n",
        )
        .expect("it is written");
        let pool = place.processes("core", &script.display().to_string());
        let mut site = DriverUnderTest::new(&pool);
        let mut workers = [worker_spec(&place, "a"), worker_spec(&place, "a")];
        for worker in &workers {
            site.start(worker.clone()).await.expect("it is started");
            site.wait_for_exit(&worker.id, false).await;
        }
        let dirs = workers.each_mut().map(|worker| {
            let dir = std::fs::read_to_string(place.path().join("seen").join(&worker.id)).expect("it has written");
            PathBuf::from(dir.trim())
        });
        assert!(dirs[0] != dirs[1] && dirs.iter().all(|dir| dir.starts_with(pool.folder())), "{dirs:?}");
        let removing = async {
            while dirs.iter().any(|dir| dir.exists()) {
                assert_eq!(site.list_changes().await, []);
            }
        };
        timeout(TEST_TIMEOUT, removing).await.expect("they are removed");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_exit_of_a_worker_without_a_controller_is_reported_once_by_the_next() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let pool = place.processes("core", &worker);
        let mut site = DriverUnderTest::new(&pool);
        let lives = worker_spec(&place, "lives");
        site.start(lives.clone()).await.expect("it is started");
        wait_until_up(&place, &lives).await;
        drop(site);
        let pid = record(&pool, &lives.id).process.expect("a process").pid;
        let stat = format!("/proc/{pid}/stat");
        let pid = rustix::process::Pid::from_raw(pid).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is there");
        let dying = async {
            while is_there(&stat) {
                tokio::task::yield_now().await;
            }
        };
        timeout(TEST_TIMEOUT, dying).await.expect("it dies");
        let mut site = DriverUnderTest::new(&pool);
        let end = site.wait_for_exit(&lives.id, false).await;
        assert!(end.reason.contains("without a controller") && end.log_tail.contains("hello from"), "{end:?}");
        assert_eq!(site.list_changes().await, []);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_commands_of_the_example_are_a_driver() {
        let place = Fixture::new();
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/drivers/processes.py");
        let notes = place.path().join("notes").display().to_string();
        let command =
            vec![example.to_owned(), notes, "/bin/sh".to_owned(), place.path().join("worker").display().to_string()];
        check_conformance(&place, PoolConfig { driver: PoolDriver::Exec, exec: command, ..PoolConfig::default() })
            .await;
    }

    /// A stand-in, until it is dropped.
    pub(super) struct StandIn(std::process::Child);

    impl StandIn {
        /// Starts a program of tests/support, which says a line when it is ready. Answers with that.
        #[expect(clippy::disallowed_methods, reason = "it is not a payload")]
        pub(super) fn start(program: &str, arguments: &[&str]) -> (Self, String) {
            use std::io::{BufRead as _, BufReader};
            use std::process::{Command, Stdio};
            let mut command = Command::new(format!("{}/../../tests/support/{program}", env!("CARGO_MANIFEST_DIR")));
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("it starts");
            let mut line = String::new();
            let out = child.stdout.as_mut().expect("it is piped");
            BufReader::new(out).read_line(&mut line).expect("it is ready");
            (Self(child), line.trim().to_owned())
        }
    }

    impl Drop for StandIn {
        /// It ends, and its workers with it, when its input does.
        fn drop(&mut self) {
            drop(self.0.stdin.take());
            self.0.wait().ok();
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn containers_are_a_driver() {
        let place = Fixture::new();
        let (_docker, settings) = docker(&place);
        check_conformance(&place, settings).await;
    }

    fn docker(place: &Fixture) -> (StandIn, PoolConfig) {
        let path = |name: &str| place.path().join(name).display().to_string();
        let (socket, worker) = (path("docker.sock"), path("worker"));
        let (docker, _) = StandIn::start("docker", &[&socket, "/bin/sh", &worker]);
        (docker, fault_tests::docker_pool(&format!("unix://{socket}"), "worker:1"))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn c11_a_container_is_stopped_whatever_its_name_is() {
        let place = Fixture::new();
        let (_docker, settings) = docker(&place);
        let pool = place.test_pool("core", settings).with_long_grace();
        let mut site = DriverUnderTest::new(&pool);
        let [renamed, other] = ["lives", "lives"].map(|key| worker_spec(&place, key));
        for worker in [&renamed, &other] {
            site.start(worker.clone()).await.expect("it is started");
            wait_until_up(&place, worker).await;
        }
        let socket = place.path().join("docker.sock").display().to_string();
        let http = journeyman_platform::http::client::client_builder().unix_socket(socket).build().expect("a client");
        let list = http.get("http://docker/containers/json?all=true").send().await.expect("it replies");
        let containers: Vec<serde_json::Value> = list.json().await.expect("a list");
        let of = |worker: &WorkerSpec| {
            let is_it = |one: &&serde_json::Value| one["Labels"]["journeyman.worker"] == worker.id;
            let container = containers.iter().find(is_it).expect("its container");
            container["Names"][0].as_str().expect("a name")[1..].to_owned()
        };
        let [first, second] = [&renamed, &other].map(of);
        for (from, to) in [(&first, "elsewhere"), (&second, &first)] {
            let url = format!("http://docker/containers/{from}/rename?name={to}");
            assert!(http.post(url).send().await.expect("it replies").status().is_success());
        }
        assert!(site.handle.stop(&renamed.id));
        site.wait_for_exit(&renamed.id, true).await;
        assert_eq!(site.list_changes().await, [], "the other one has its name, and runs");
        assert!(site.handle.stop(&other.id));
        site.wait_for_exit(&other.id, true).await;
    }

    /// The stand-in reads the unit of the example, but for where things are.
    #[tokio::test(flavor = "multi_thread")]
    async fn instances_of_a_template_unit_are_a_driver() {
        let place = Fixture::new();
        let root = env!("CARGO_MANIFEST_DIR");
        let example =
            std::fs::read_to_string(format!("{root}/../../examples/systemd/worker@.service")).expect("the unit");
        let (here, folder) = (place.path().display(), place.path().join("pools"));
        let line = |line: &str| match line.split_once('=') {
            Some(("EnvironmentFile", _)) => format!("EnvironmentFile={}/*/%i.env\n", folder.display()),
            Some(("ExecStart", _)) => format!("ExecStart=/bin/sh {here}/worker\n"),
            Some(_) | None => format!("{line}\n"),
        };
        let unit = example.lines().map(line).collect::<String>();
        let units = place.path().join("units");
        std::fs::create_dir(&units).expect("a folder");
        std::fs::write(units.join("worker@.service"), unit).expect("it is written");
        let stand_in = format!("{root}/../../tests/support/systemctl");
        let template = SystemdDriverConfig {
            unit: "worker".to_owned(),
            systemctl: vec![stand_in, units.join("worker@.service").display().to_string()],
        };
        let settings = PoolConfig { driver: PoolDriver::Systemd, systemd: Some(template), ..PoolConfig::default() };
        check_conformance(&place, settings).await;
    }
}
