//! What every driver keeps, whatever it starts workers with. Each is held against something that behaves as the real one is
//! documented to; only processes of this host are the real thing here.

mod kubernetes_tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;

/// What a worker is here: it does as its key says.
pub(super) const WORKER: &str = r#"#!/bin/sh
echo "hello from $WORKER_ID"
case "$WORKER_KEY" in
dies*) echo "goodbye"; exit 3 ;;
stays*) trap '' TERM ;;
wraps*) (trap '' TERM; echo >"$SEEN/$WORKER_ID.up"; while [ ! -e "$SEEN/go" ]; do sleep 0.05; done; echo >"$SEEN/$WORKER_ID.done") & ;;
strays*) setsid sh -c 'echo $$ >"$SEEN/$WORKER_ID.stray"; exec sleep 1000' & ;;
lingers*) trap 'echo told >>"$SEEN/$WORKER_ID.told"' TERM ;;
esac
exec 3>&1
printf '%s' "$WORKER_KEY" >"$SEEN/$WORKER_ID"
while :; do sleep 0.05; done
"#;

/// Any wait of a test is over by then.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a worker that does not go has.
const GRACE: Duration = Duration::from_millis(200);

/// A pool with its driver, and what it works with.
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

    pub(super) fn driver_config(&self, pool: &str, means: DriverKind) -> DriverConfig {
        let folder = self.path().join("pools").join(pool);
        DriverConfig { pool: pool.to_owned(), kind: means, env: BTreeMap::new(), folder, termination_grace: GRACE }
    }
}

/// A controller's driver, as its staff has it.
struct DriverUnderTest {
    handle: DriverHandle,
    tasks: JoinSet<()>,
    /// Those whose end was told.
    ended: BTreeSet<String>,
    /// Those whose end was told to the one before, which may not have forgotten them.
    ended_before: BTreeSet<String>,
}

impl DriverUnderTest {
    fn new(posting: &DriverConfig) -> Self {
        let mut tasks = JoinSet::new();
        let handle = start_driver(posting, Clock::boot(), &mut tasks).expect("it begins").expect("it starts workers");
        handle.set_active(true);
        Self { handle, tasks, ended: BTreeSet::new(), ended_before: BTreeSet::new() }
    }

    /// The controller is killed, and the next one begins.
    async fn restart(mut self, posting: &DriverConfig) -> Self {
        self.tasks.shutdown().await;
        self.ended_before.append(&mut self.ended);
        Self { ended_before: self.ended_before, ..Self::new(posting) }
    }

    /// What is news.
    fn check_changes(&mut self, changes: Result<Vec<WorkerChange>, DriverError>) -> Vec<WorkerChange> {
        let mut changes = changes.expect("it can say who is there");
        changes.retain(|change| match change {
            WorkerChange::Exited { id, .. } => {
                assert!(self.ended.insert(id.clone()), "{id} ends once");
                !self.ended_before.remove(id)
            }
            WorkerChange::Discovered { .. }
            | WorkerChange::Pending { .. }
            | WorkerChange::PendingResolved { .. }
            | WorkerChange::Stopping { .. } => true,
        });
        changes
    }

    async fn next_event(&mut self) -> DriverEvent {
        timeout(TEST_TIMEOUT, self.handle.next_event()).await.expect("it says something").expect("it is there")
    }

    /// What has changed until now.
    async fn list_changes(&mut self) -> Vec<WorkerChange> {
        let (asked, mut all) = (self.handle.request_list(), Vec::new());
        loop {
            match self.next_event().await {
                DriverEvent::Listed { number, changes } => {
                    all.extend(self.check_changes(changes));
                    if number >= asked {
                        return all;
                    }
                }
                DriverEvent::Started(id) | DriverEvent::StartFailed { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    /// Looks until something has changed.
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

    /// Starts one, as far as that can be had.
    async fn start(&mut self, assignment: WorkerSpec) -> Result<(), DriverError> {
        let id = assignment.id.clone();
        assert!(self.handle.start(assignment));
        loop {
            match self.next_event().await {
                DriverEvent::Started(started) if started == id => return Ok(()),
                DriverEvent::StartFailed { id: refused, error: why } if refused == id => return Err(why),
                // It may have looked meanwhile.
                DriverEvent::Listed { changes, .. } => assert_eq!(self.check_changes(changes), []),
                DriverEvent::Started(id) | DriverEvent::StartFailed { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    /// Sees one end.
    async fn wait_for_exit(&mut self, id: &str, was_told: bool) -> WorkerExit {
        match self.next_change().await {
            WorkerChange::Exited { id: ended, exit: end, requested: told, .. } => {
                assert_eq!((ended.as_str(), told), (id, was_told), "{end:?}");
                end
            }
            other @ (WorkerChange::Discovered { .. }
            | WorkerChange::Pending { .. }
            | WorkerChange::PendingResolved { .. }
            | WorkerChange::Stopping { .. }) => {
                panic!("{id} is known: {other:?}")
            }
        }
    }
}

fn key(text: &str) -> Key {
    Key::new(text).expect("it is no longer than a key may be")
}

/// A worker of this key. Where it is up it says so in the folder that `SEEN` names.
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

/// A worker whose start cannot be had, whoever starts it.
fn unstartable_spec(place: &Fixture) -> WorkerSpec {
    let mut assignment = worker_spec(place, "cannot");
    // No process has such a variable.
    assignment.variables.insert("CANNOT".to_owned(), "\0".to_owned());
    assignment
}

/// Everything that is asked of a driver.
pub(super) async fn check_conformance(place: &Fixture, means: DriverKind) {
    let (core, other) = (place.driver_config("core", means.clone()), place.driver_config("core-2", means));
    let (mut site, mut stranger) = (DriverUnderTest::new(&core), DriverUnderTest::new(&other));
    assert_eq!(site.list_changes().await, [], "nobody is there");

    // One that is started is there, and told what it is to know. That it is there is no news.
    let idle = worker_spec(place, "lives");
    site.start(idle.clone()).await.expect("it is started");
    assert_eq!(site.list_changes().await, []);
    wait_until_up(place, &idle).await;

    // Any key can be had, and one that would make too long a name; each is found again by the next controller.
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
        other @ (WorkerChange::Pending { .. }
        | WorkerChange::PendingResolved { .. }
        | WorkerChange::Stopping { .. }
        | WorkerChange::Exited { .. }) => {
            panic!("they go on: {other:?}")
        }
    });
    assert_eq!(found.collect::<BTreeMap<_, _>>(), there);
    assert_eq!(site.list_changes().await, [], "once");
    assert_eq!(stranger.list_changes().await, [], "those of another pool are none of its business");

    // Those that are told to go go.
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

    // One that does not is killed.
    let stays = worker_spec(place, "stays");
    site.start(stays.clone()).await.expect("it is started");
    wait_until_up(place, &stays).await;
    assert!(site.handle.stop(&stays.id));
    site.wait_for_exit(&stays.id, true).await;

    // One that takes its time to go is known to go by the next controller, which does not tell it again.
    let patient = DriverConfig { termination_grace: TEST_TIMEOUT, ..core.clone() };
    let mut site = site.restart(&patient).await;
    let lingers = worker_spec(place, "lingers");
    site.start(lingers.clone()).await.expect("it is started");
    wait_until_up(place, &lingers).await;
    assert!(site.handle.stop(&lingers.id));
    let told = place.path().join("seen").join(format!("{}.told", lingers.id));
    let is_noted = || {
        let notes = std::fs::read_dir(&core.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        notes.into_iter().any(|path| path.extension().is_some_and(|kind| kind == "told"))
    };
    let telling = async {
        while !(told.exists() && is_noted()) {
            assert_eq!(site.list_changes().await, []);
        }
    };
    timeout(TEST_TIMEOUT, telling).await.expect("it is told");
    let mut site = site.restart(&patient).await;
    let (id, key) = (lingers.id.clone(), lingers.key.clone());
    assert_eq!(
        site.list_changes().await,
        [WorkerChange::Discovered { id: id.clone(), key }, WorkerChange::Stopping { id: id.clone() }]
    );
    for _ in 0..3 {
        assert_eq!(site.list_changes().await, []);
    }
    assert_eq!(std::fs::read_to_string(&told).expect("it was told"), "told\n", "once");
    let mut site = site.restart(&core).await;
    assert_eq!(site.list_changes().await.len(), 2, "found, and going");
    site.wait_for_exit(&id, true).await;

    // One that dies at once is told of, and how, and what it has said.
    let dies = worker_spec(place, "dies");
    site.start(dies.clone()).await.expect("it is started");
    let end = site.wait_for_exit(&dies.id, false).await;
    assert!(end.reason.contains("exit status: 3"), "{end:?}");
    assert!(end.log_tail.contains("goodbye"), "{end:?}");

    // One that cannot be started is refused, or is there and dies.
    let cannot = unstartable_spec(place);
    if site.start(cannot.clone()).await.is_ok() {
        site.wait_for_exit(&cannot.id, false).await;
    }

    // Of those who have gone nothing is left by which anybody would be found, and no secret, whoever has to forget them.
    let mut site = site.restart(&core).await;
    let left = || {
        let entries = std::fs::read_dir(&core.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| path.extension().is_none_or(|kind| kind != "log")).collect::<Vec<_>>()
    };
    let forgetting = async {
        while !left().is_empty() {
            assert_eq!(site.list_changes().await, []);
        }
    };
    assert!(timeout(TEST_TIMEOUT, forgetting).await.is_ok(), "{:?}", left());
    assert_eq!(site.list_changes().await, []);
}

/// A worker has written what key it was told. Nobody tells when it has: it has to be looked for.
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
        check_conformance(
            &place,
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        )
        .await;
    }

    /// Where a worker's stray is, once it is there.
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

    /// Whether a process is there, and not just waited for.
    fn is_there(stat: &str) -> bool {
        let stat = std::fs::read_to_string(stat);
        stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| !state.starts_with(" Z")))
    }

    /// Whether a driver may use control groups, if this host has any.
    #[derive(Debug, Clone, Copy)]
    enum Groups {
        Allowed,
        Denied,
    }

    impl Groups {
        /// To be kept until the driver is dropped.
        fn apply(self, config: &DriverConfig) -> Option<crate::host::containment::WorkerCgroups> {
            let name = format!("{} {}", config.pool, config.folder.display());
            match self {
                Self::Allowed => None,
                Self::Denied => {
                    crate::host::containment::WorkerCgroups::probe(&name).ok().inspect(|groups| groups.deny_groups())
                }
            }
        }
    }

    fn record(posting: &DriverConfig, id: &str) -> serde_json::Value {
        let bytes = std::fs::read(posting.folder.join(format!("{id}.json"))).expect("it is written down");
        serde_json::from_slice(&bytes).expect("it is JSON")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_worker_puts_elsewhere_goes_with_it_whoever_sees_it_end() {
        if let Err(why) = crate::host::containment::WorkerCgroups::probe("whether there are any") {
            assert!(std::env::var_os("CI").is_none(), "no control groups: {why}");
            return println!("MISSING: control groups, so nothing was tried: {why}");
        }
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.driver_config(
            "core",
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        );
        let mut site = DriverUnderTest::new(&posting);
        for is_adopted in [false, true] {
            let strays = worker_spec(&place, "strays");
            site.start(strays.clone()).await.expect("it is started");
            let (stray, record) = (stray(&place, &strays).await, record(&posting, &strays.id));
            assert!(is_there(&stray));
            if is_adopted {
                site = site.restart(&posting).await;
                assert_eq!(site.list_changes().await.len(), 1, "it is found");
                let pid = record["pid"]
                    .as_i64()
                    .and_then(|pid| i32::try_from(pid).ok())
                    .and_then(rustix::process::Pid::from_raw);
                rustix::process::kill_process(pid.expect("a number"), rustix::process::Signal::KILL)
                    .expect("it is there");
            } else {
                assert!(site.handle.stop(&strays.id));
            }
            site.wait_for_exit(&strays.id, !is_adopted).await;
            let group = record["group"].as_str().expect("it is in a control group");
            let going = async {
                while is_there(&stray) || Path::new(group).exists() {
                    assert_eq!(site.list_changes().await, []);
                }
            };
            timeout(TEST_TIMEOUT, going).await.expect("nothing is left");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_shell_has_started_that_was_told_to_go_has_its_time() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let means = DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] });
        let posting = DriverConfig { termination_grace: TEST_TIMEOUT, ..place.driver_config("core", means) };
        let seen = place.path().join("seen");
        for groups in [Groups::Allowed, Groups::Denied] {
            let _denied = groups.apply(&posting);
            let mut site = DriverUnderTest::new(&posting);
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
                assert_eq!(site.list_changes().await, [], "it goes on");
            }
            // So it does for one that stands by, and for the next one.
            let mut tasks = JoinSet::new();
            let line =
                start_driver(&posting, Clock::boot(), &mut tasks).expect("it begins").expect("it starts workers");
            let (ended, earlier) = Default::default();
            let mut standby = DriverUnderTest { handle: line, tasks, ended, ended_before: earlier };
            let (id, key) = (wraps.id.clone(), wraps.key.clone());
            let found = [WorkerChange::Discovered { id: id.clone(), key }, WorkerChange::Stopping { id }];
            assert_eq!(standby.list_changes().await, found);
            assert_eq!(standby.list_changes().await, []);
            site = site.restart(&posting).await;
            assert_eq!(site.list_changes().await, found);
            assert_eq!((standby.list_changes().await, site.list_changes().await), (Vec::new(), Vec::new()));
            assert!(!done.exists());
            std::fs::write(seen.join("go"), "").expect("it is written");
            site.wait_for_exit(&wraps.id, true).await;
            assert!(done.exists(), "{groups:?}");
            std::fs::remove_file(seen.join("go")).expect("it was written");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn where_not_all_can_be_seen_nobody_is_taken_for_gone() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.driver_config(
            "core",
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        );
        let mut site = DriverUnderTest::new(&posting);
        let goes = worker_spec(&place, "goes");
        site.start(goes.clone()).await.expect("it is started");
        wait_until_up(&place, &goes).await;
        drop(site);
        let no_record = posting.folder.join("odd.json");
        std::os::unix::fs::symlink("odd.json", &no_record).expect("a link to itself");
        let mut site = DriverUnderTest::new(&posting);
        let asked = site.handle.request_list();
        let why = loop {
            if let DriverEvent::Listed { number, changes } = site.next_event().await
                && number >= asked
            {
                break changes.expect_err("not all was seen").0;
            }
        };
        assert!(why.contains("odd.json"), "{why}");
        std::fs::remove_file(&no_record).expect("it was there");
        let found = WorkerChange::Discovered { id: goes.id.clone(), key: goes.key.clone() };
        let seeing = async {
            loop {
                site.handle.request_list();
                if let DriverEvent::Listed { changes: Ok(changes), .. } = site.next_event().await {
                    break changes;
                }
            }
        };
        assert_eq!(timeout(TEST_TIMEOUT, seeing).await.expect("it is seen"), [found]);
        assert!(site.handle.stop(&goes.id));
        site.wait_for_exit(&goes.id, true).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_a_controller_was_killed_in_starting_is_found_by_the_next_one_and_told_to_go_like_any() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.driver_config(
            "core",
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        );
        for groups in [Groups::Allowed, Groups::Denied] {
            let _denied = groups.apply(&posting);
            let lives = worker_spec(&place, "lives");
            let mut site = DriverUnderTest::new(&posting);
            site.start(lives.clone()).await.expect("it is started");
            wait_until_up(&place, &lives).await;
            drop(site);
            // As it was before the process was known.
            let mut begun = record(&posting, &lives.id);
            let known = begun.clone();
            let fields = begun.as_object_mut().expect("an object");
            fields.retain(|name, _| name != "pid" && name != "started");
            let (path, bytes) = (posting.folder.join(format!("{}.begun", lives.id)), begun.to_string());
            std::fs::write(&path, bytes).expect("it is written");
            std::fs::remove_file(posting.folder.join(format!("{}.json", lives.id))).expect("it was there");
            let mut site = DriverUnderTest::new(&posting);
            let (id, key) = (lives.id.clone(), lives.key.clone());
            assert_eq!(site.list_changes().await, [WorkerChange::Discovered { id, key }]);
            assert_eq!((record(&posting, &lives.id), path.exists()), (known, false));
            assert!(site.handle.stop(&lives.id));
            site.wait_for_exit(&lives.id, true).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_was_never_started_is_looked_for_and_then_given_up() {
        let place = Fixture::new();
        let posting = place
            .driver_config("core", DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned()] }));
        let mut site = DriverUnderTest::new(&posting);
        let begun = |boot: &str| {
            let id = uuid::Uuid::new_v4();
            let path = posting.folder.join(format!("{id}.begun"));
            let begun = serde_json::json!({"id": id.to_string(), "key": "k", "boot": boot}).to_string();
            std::fs::write(&path, begun).expect("it is written");
            path
        };
        let crate::domain::journal::BootId(boot) = crate::host::journal::current_boot();
        let (fresh, of_an_earlier_boot) = (begun(&boot), begun("another"));
        assert_eq!(site.list_changes().await, []);
        assert!(fresh.exists(), "it may be just being started");
        assert!(!of_an_earlier_boot.exists());
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::options()
            .append(true)
            .open(&fresh)
            .and_then(|file| file.set_modified(long_ago))
            .expect("it can be set");
        assert_eq!(site.list_changes().await, []);
        assert!(!fresh.exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_dies_while_no_controller_looks_is_told_of_by_the_next_one_once() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.driver_config(
            "core",
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        );
        let mut site = DriverUnderTest::new(&posting);
        let lives = worker_spec(&place, "lives");
        site.start(lives.clone()).await.expect("it is started");
        wait_until_up(&place, &lives).await;
        drop(site);
        let pid = record(&posting, &lives.id)["pid"].as_i64().expect("a number");
        let stat = format!("/proc/{pid}/stat");
        let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a number");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it is there");
        let dying = async {
            while is_there(&stat) {
                tokio::task::yield_now().await;
            }
        };
        timeout(TEST_TIMEOUT, dying).await.expect("it dies");
        let mut site = DriverUnderTest::new(&posting);
        let end = site.wait_for_exit(&lives.id, false).await;
        assert!(end.reason.contains("no controller") && end.log_tail.contains("hello from"), "{end:?}");
        assert_eq!(site.list_changes().await, []);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_control_group_that_nothing_is_written_down_of_is_emptied_and_removed() {
        let place = Fixture::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.driver_config(
            "core",
            DriverKind::Subprocess(SubprocessConfig { command: vec!["/bin/sh".to_owned(), worker] }),
        );
        let name = format!("{} {}", posting.pool, posting.folder.display());
        let groups = match crate::host::containment::WorkerCgroups::probe(&name) {
            Ok(groups) => groups,
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "no control groups: {why}");
                return println!("MISSING: control groups, so nothing was tried: {why}");
            }
        };
        let group = groups.create("unwritten").expect("a control group");
        let (shim, arguments) = group.command_prefix().expect("the exec shim");
        let mut child = tokio::process::Command::new(shim);
        let mut child = child.args(arguments).args(["sleep", "1000"]).spawn().expect("it is started");
        let mut site = DriverUnderTest::new(&posting);
        assert_eq!(site.list_changes().await, []);
        assert!(matches!(child.try_wait(), Ok(None)), "it may be just being started");
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::open(group.path()).expect("it is there").set_modified(long_ago).expect("it can be set");
        let ending = async {
            while group.path().exists() {
                assert_eq!(site.list_changes().await, []);
            }
        };
        timeout(TEST_TIMEOUT, ending).await.expect("it is ended");
        assert!(!child.wait().await.expect("it ends").success());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_commands_of_the_example_are_a_driver() {
        let place = Fixture::new();
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/drivers/processes.py");
        let notes = place.path().join("notes").display().to_string();
        let command =
            vec![example.to_owned(), notes, "/bin/sh".to_owned(), place.path().join("worker").display().to_string()];
        let commands = ExecConfig { list: command.clone(), start: command.clone(), stop: command };
        check_conformance(&place, DriverKind::Exec(commands)).await;
    }

    /// A stand-in, until it is dropped.
    pub(super) struct StandIn(std::process::Child);

    impl StandIn {
        /// Starts a program of tests/support, which says a line when it is ready. Answers with that.
        #[expect(clippy::disallowed_methods, reason = "it is not a payload")]
        pub(super) fn start(program: &str, arguments: &[&str]) -> (Self, String) {
            use std::io::{BufRead as _, BufReader};
            use std::process::{Command, Stdio};
            let mut command = Command::new(format!("{}/tests/support/{program}", env!("CARGO_MANIFEST_DIR")));
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
        let path = |name: &str| place.path().join(name).display().to_string();
        let (socket, worker) = (path("docker.sock"), path("worker"));
        let (_docker, _) = StandIn::start("docker", &[&socket, "/bin/sh", &worker]);
        let containers = DockerConfig {
            host: format!("unix://{socket}"),
            image: "worker:1".to_owned(),
            command: Vec::new(),
            network: Some("host".to_owned()),
        };
        check_conformance(&place, DriverKind::Docker(containers)).await;
    }

    /// The stand-in reads the unit of the example, but for where things are.
    #[tokio::test(flavor = "multi_thread")]
    async fn instances_of_a_template_unit_are_a_driver() {
        let place = Fixture::new();
        let root = env!("CARGO_MANIFEST_DIR");
        let example = std::fs::read_to_string(format!("{root}/examples/systemd/worker@.service")).expect("the unit");
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
        let stand_in = format!("{root}/tests/support/systemctl");
        let template = SystemdConfig {
            unit: "worker".to_owned(),
            systemctl: vec![stand_in, units.join("worker@.service").display().to_string()],
        };
        check_conformance(&place, DriverKind::Systemd(template)).await;
    }
}
