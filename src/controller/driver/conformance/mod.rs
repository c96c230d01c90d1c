//! What every driver keeps, whatever it starts workers with. Each is held against something that behaves as the real one is
//! documented to; only processes of this host are the real thing here.

mod cluster;

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
const LONGEST: Duration = Duration::from_secs(60);
/// How long a worker that does not go has.
const GRACE: Duration = Duration::from_millis(200);

/// A pool with its driver, and what it works with.
pub(super) struct Place {
    pub(super) folder: tempfile::TempDir,
}

impl Place {
    pub(super) fn new() -> Self {
        let place = Self { folder: tempfile::tempdir().expect("a folder") };
        std::fs::create_dir(place.path().join("seen")).expect("a folder");
        std::fs::write(place.path().join("worker"), WORKER).expect("it is written");
        place
    }

    pub(super) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn posting(&self, pool: &str, means: Means) -> Posting {
        let folder = self.path().join("pools").join(pool);
        Posting { pool: pool.to_owned(), means, env: BTreeMap::new(), folder, grace: GRACE }
    }
}

/// A controller's driver, as its staff has it.
struct Site {
    line: Line,
    tasks: JoinSet<()>,
    /// Those whose end was told.
    ended: BTreeSet<String>,
    /// Those whose end was told to the one before, which may not have forgotten them.
    earlier: BTreeSet<String>,
}

impl Site {
    fn new(posting: &Posting) -> Self {
        let mut tasks = JoinSet::new();
        let line = engage(posting, Clock::boot(), &mut tasks).expect("it begins").expect("it starts workers");
        line.is_in_charge(true);
        Self { line, tasks, ended: BTreeSet::new(), earlier: BTreeSet::new() }
    }

    /// The controller is killed, and the next one begins.
    async fn next(mut self, posting: &Posting) -> Self {
        self.tasks.shutdown().await;
        self.earlier.append(&mut self.ended);
        Self { earlier: self.earlier, ..Self::new(posting) }
    }

    /// What is news.
    fn heard(&mut self, changes: Result<Vec<Change>, Trouble>) -> Vec<Change> {
        let mut changes = changes.expect("it can say who is there");
        changes.retain(|change| match change {
            Change::Ended { id, .. } => {
                assert!(self.ended.insert(id.clone()), "{id} ends once");
                !self.earlier.remove(id)
            }
            Change::Found { .. } | Change::Promised { .. } | Change::Kept { .. } | Change::Going { .. } => true,
        });
        changes
    }

    async fn news(&mut self) -> News {
        timeout(LONGEST, self.line.news()).await.expect("it says something").expect("it is there")
    }

    /// What has changed until now.
    async fn looks(&mut self) -> Vec<Change> {
        let (asked, mut all) = (self.line.look(), Vec::new());
        loop {
            match self.news().await {
                News::Looked { number, changes } => {
                    all.extend(self.heard(changes));
                    if number >= asked {
                        return all;
                    }
                }
                News::Started(id) | News::Refused { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    /// Looks until something has changed.
    async fn change(&mut self) -> Change {
        let looking = async {
            loop {
                let mut changes = self.looks().await;
                if let Some(change) = changes.pop() {
                    assert_eq!(changes, []);
                    return change;
                }
            }
        };
        timeout(LONGEST, looking).await.expect("something changes")
    }

    /// Starts one, as far as that can be had.
    async fn starts(&mut self, assignment: Assignment) -> Result<(), Trouble> {
        let id = assignment.id.clone();
        assert!(self.line.start(assignment));
        loop {
            match self.news().await {
                News::Started(started) if started == id => return Ok(()),
                News::Refused { id: refused, why } if refused == id => return Err(why),
                // It may have looked meanwhile.
                News::Looked { changes, .. } => assert_eq!(self.heard(changes), []),
                News::Started(id) | News::Refused { id, .. } => panic!("{id} was not to be started"),
            }
        }
    }

    /// Sees one end.
    async fn ends(&mut self, id: &str, was_told: bool) -> End {
        match self.change().await {
            Change::Ended { id: ended, end, told, .. } => {
                assert_eq!((ended.as_str(), told), (id, was_told), "{end:?}");
                end
            }
            other @ (Change::Found { .. } | Change::Promised { .. } | Change::Kept { .. } | Change::Going { .. }) => {
                panic!("{id} is known: {other:?}")
            }
        }
    }
}

fn key(text: &str) -> Key {
    Key::new(text).expect("it is no longer than a key may be")
}

/// A worker of this key. Where it is up it says so in the folder that `SEEN` names.
pub(super) fn assignment(place: &Place, text: &str) -> Assignment {
    let id = uuid::Uuid::new_v4().to_string();
    let variables = [
        ("WORKER_ID", id.clone()),
        ("WORKER_KEY", text.to_owned()),
        ("WORKER_AMQP_URI", "amqp://me:$ecret \"quoted\" \\ `x`@h/".to_owned()),
        ("SEEN", place.path().join("seen").display().to_string()),
    ];
    let variables = variables.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Assignment { id, key: key(text), variables }
}

/// A worker whose start cannot be had, whoever starts it.
fn impossible(place: &Place) -> Assignment {
    let mut assignment = assignment(place, "cannot");
    // No process has such a variable.
    assignment.variables.insert("CANNOT".to_owned(), "\0".to_owned());
    assignment
}

/// Everything that is asked of a driver.
pub(super) async fn conforms(place: &Place, means: Means) {
    let (core, other) = (place.posting("core", means.clone()), place.posting("core-2", means));
    let (mut site, mut stranger) = (Site::new(&core), Site::new(&other));
    assert_eq!(site.looks().await, [], "nobody is there");

    // One that is started is there, and told what it is to know. That it is there is no news.
    let idle = assignment(place, "lives");
    site.starts(idle.clone()).await.expect("it is started");
    assert_eq!(site.looks().await, []);
    is_up(place, &idle).await;

    // Any key can be had, and one that would make too long a name; each is found again by the next controller.
    let keys = ["", "-", "Ü/ %2d.", "a=b\u{1}\"$`\\'\n", &format!("lives{}", "é".repeat(120)), "lives"];
    let mut there = BTreeMap::from([(idle.id.clone(), idle.key.clone())]);
    for text in keys {
        let worker = assignment(place, text);
        site.starts(worker.clone()).await.expect("it is started");
        there.insert(worker.id, worker.key);
    }
    let mut site = site.next(&core).await;
    let found = site.looks().await.into_iter().map(|change| match change {
        Change::Found { id, key } => (id, key),
        other @ (Change::Promised { .. } | Change::Kept { .. } | Change::Going { .. } | Change::Ended { .. }) => {
            panic!("they go on: {other:?}")
        }
    });
    assert_eq!(found.collect::<BTreeMap<_, _>>(), there);
    assert_eq!(site.looks().await, [], "once");
    assert_eq!(stranger.looks().await, [], "those of another pool are none of its business");

    // Those that are told to go go.
    for id in there.keys() {
        assert!(site.line.stop(id));
    }
    let going = async {
        while !there.is_empty() {
            for change in site.looks().await {
                let Change::Ended { id, told: true, .. } = &change else { panic!("they go: {change:?}") };
                assert!(there.remove(id).is_some(), "{id} goes once");
            }
        }
    };
    timeout(LONGEST, going).await.expect("they go");

    // One that does not is killed.
    let stays = assignment(place, "stays");
    site.starts(stays.clone()).await.expect("it is started");
    is_up(place, &stays).await;
    assert!(site.line.stop(&stays.id));
    site.ends(&stays.id, true).await;

    // One that takes its time to go is known to go by the next controller, which does not tell it again.
    let patient = Posting { grace: LONGEST, ..core.clone() };
    let mut site = site.next(&patient).await;
    let lingers = assignment(place, "lingers");
    site.starts(lingers.clone()).await.expect("it is started");
    is_up(place, &lingers).await;
    assert!(site.line.stop(&lingers.id));
    let told = place.path().join("seen").join(format!("{}.told", lingers.id));
    let is_noted = || {
        let notes = std::fs::read_dir(&core.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        notes.into_iter().any(|path| path.extension().is_some_and(|kind| kind == "told"))
    };
    let telling = async {
        while !(told.exists() && is_noted()) {
            assert_eq!(site.looks().await, []);
        }
    };
    timeout(LONGEST, telling).await.expect("it is told");
    let mut site = site.next(&patient).await;
    let (id, key) = (lingers.id.clone(), lingers.key.clone());
    assert_eq!(site.looks().await, [Change::Found { id: id.clone(), key }, Change::Going { id: id.clone() }]);
    for _ in 0..3 {
        assert_eq!(site.looks().await, []);
    }
    assert_eq!(std::fs::read_to_string(&told).expect("it was told"), "told\n", "once");
    let mut site = site.next(&core).await;
    assert_eq!(site.looks().await.len(), 2, "found, and going");
    site.ends(&id, true).await;

    // One that dies at once is told of, and how, and what it has said.
    let dies = assignment(place, "dies");
    site.starts(dies.clone()).await.expect("it is started");
    let end = site.ends(&dies.id, false).await;
    assert!(end.how.contains("exit status: 3"), "{end:?}");
    assert!(end.last_words.contains("goodbye"), "{end:?}");

    // One that cannot be started is refused, or is there and dies.
    let cannot = impossible(place);
    if site.starts(cannot.clone()).await.is_ok() {
        site.ends(&cannot.id, false).await;
    }

    // Of those who have gone nothing is left by which anybody would be found, and no secret, whoever has to forget them.
    let mut site = site.next(&core).await;
    let left = || {
        let entries = std::fs::read_dir(&core.folder).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| path.extension().is_none_or(|kind| kind != "log")).collect::<Vec<_>>()
    };
    let forgetting = async {
        while !left().is_empty() {
            assert_eq!(site.looks().await, []);
        }
    };
    assert!(timeout(LONGEST, forgetting).await.is_ok(), "{:?}", left());
    assert_eq!(site.looks().await, []);
}

/// A worker has written what key it was told. Nobody tells when it has: it has to be looked for.
async fn is_up(place: &Place, worker: &Assignment) {
    let path = place.path().join("seen").join(&worker.id);
    let looking = async {
        while std::fs::read_to_string(&path).ok().as_deref() != Some(worker.key.as_str()) {
            tokio::task::yield_now().await;
        }
    };
    timeout(LONGEST, looking).await.expect("it is up");
}

mod real {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn processes_of_this_host_are_a_driver() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        conforms(&place, Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] })).await;
    }

    /// Where a worker's stray is, once it is there.
    async fn stray(place: &Place, worker: &Assignment) -> String {
        let path = place.path().join("seen").join(format!("{}.stray", worker.id));
        let looking = async {
            loop {
                match std::fs::read_to_string(&path) {
                    Ok(pid) if pid.ends_with('\n') => return format!("/proc/{}/stat", pid.trim()),
                    Ok(_) | Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        timeout(LONGEST, looking).await.expect("it strays")
    }

    /// Whether a process is there, and not just waited for.
    fn is_there(stat: &str) -> bool {
        let stat = std::fs::read_to_string(stat);
        stat.is_ok_and(|stat| stat.rsplit_once(')').is_some_and(|(_, state)| !state.starts_with(" Z")))
    }

    fn record(posting: &Posting, id: &str) -> serde_json::Value {
        let bytes = std::fs::read(posting.folder.join(format!("{id}.json"))).expect("it is written down");
        serde_json::from_slice(&bytes).expect("it is JSON")
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_worker_puts_elsewhere_goes_with_it_whoever_sees_it_end() {
        if let Err(why) = crate::host::containment::ControlGroups::establish("whether there are any") {
            assert!(std::env::var_os("CI").is_none(), "no control groups: {why}");
            return println!("MISSING: control groups, so nothing was tried: {why}");
        }
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] }));
        let mut site = Site::new(&posting);
        for is_adopted in [false, true] {
            let strays = assignment(&place, "strays");
            site.starts(strays.clone()).await.expect("it is started");
            let (stray, record) = (stray(&place, &strays).await, record(&posting, &strays.id));
            assert!(is_there(&stray));
            if is_adopted {
                site = site.next(&posting).await;
                assert_eq!(site.looks().await.len(), 1, "it is found");
                let pid = record["pid"]
                    .as_i64()
                    .and_then(|pid| i32::try_from(pid).ok())
                    .and_then(rustix::process::Pid::from_raw);
                rustix::process::kill_process(pid.expect("a number"), rustix::process::Signal::KILL)
                    .expect("it is there");
            } else {
                assert!(site.line.stop(&strays.id));
            }
            site.ends(&strays.id, !is_adopted).await;
            let group = record["group"].as_str().expect("it is in a control group");
            let going = async {
                while is_there(&stray) || Path::new(group).exists() {
                    assert_eq!(site.looks().await, []);
                }
            };
            timeout(LONGEST, going).await.expect("nothing is left");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_shell_has_started_that_was_told_to_go_has_its_time() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let means = Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] });
        let posting = Posting { grace: LONGEST, ..place.posting("core", means) };
        let mut site = Site::new(&posting);
        let seen = place.path().join("seen");
        // With a control group and without: no shell passes on such a name.
        for odd in [None, Some("spring.host")] {
            let mut wraps = assignment(&place, "wraps");
            wraps.variables.extend(odd.map(|name| (name.to_owned(), "h".to_owned())));
            site.starts(wraps.clone()).await.expect("it is started");
            let (up, done) = (seen.join(format!("{}.up", wraps.id)), seen.join(format!("{}.done", wraps.id)));
            timeout(LONGEST, async {
                while !up.exists() {
                    tokio::task::yield_now().await
                }
            })
            .await
            .expect("it is up");
            assert!(site.line.stop(&wraps.id));
            for _ in 0..3 {
                assert_eq!(site.looks().await, [], "it goes on");
            }
            // So it does for one that stands by, and for the next one.
            let mut tasks = JoinSet::new();
            let line = engage(&posting, Clock::boot(), &mut tasks).expect("it begins").expect("it starts workers");
            let (ended, earlier) = Default::default();
            let mut standby = Site { line, tasks, ended, earlier };
            let (id, key) = (wraps.id.clone(), wraps.key.clone());
            let found = [Change::Found { id: id.clone(), key }, Change::Going { id }];
            assert_eq!(standby.looks().await, found);
            assert_eq!(standby.looks().await, []);
            site = site.next(&posting).await;
            assert_eq!(site.looks().await, found);
            assert_eq!((standby.looks().await, site.looks().await), (Vec::new(), Vec::new()));
            assert!(!done.exists());
            std::fs::write(seen.join("go"), "").expect("it is written");
            site.ends(&wraps.id, true).await;
            assert!(done.exists(), "{odd:?}");
            std::fs::remove_file(seen.join("go")).expect("it was written");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn where_not_all_can_be_seen_nobody_is_taken_for_gone() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] }));
        let mut site = Site::new(&posting);
        let goes = assignment(&place, "goes");
        site.starts(goes.clone()).await.expect("it is started");
        is_up(&place, &goes).await;
        drop(site);
        let no_record = posting.folder.join("odd.json");
        std::os::unix::fs::symlink("odd.json", &no_record).expect("a link to itself");
        let mut site = Site::new(&posting);
        let asked = site.line.look();
        let why = loop {
            if let News::Looked { number, changes } = site.news().await
                && number >= asked
            {
                break changes.expect_err("not all was seen").0;
            }
        };
        assert!(why.contains("odd.json"), "{why}");
        std::fs::remove_file(&no_record).expect("it was there");
        let found = Change::Found { id: goes.id.clone(), key: goes.key.clone() };
        let seeing = async {
            loop {
                site.line.look();
                if let News::Looked { changes: Ok(changes), .. } = site.news().await {
                    break changes;
                }
            }
        };
        assert_eq!(timeout(LONGEST, seeing).await.expect("it is seen"), [found]);
        assert!(site.line.stop(&goes.id));
        site.ends(&goes.id, true).await;
    }

    /// With a control group and without: no shell passes on a variable of the second's name.
    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_a_controller_was_killed_in_starting_is_found_by_the_next_one_and_told_to_go_like_any() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] }));
        for odd in [None, Some("spring.host")] {
            let mut lives = assignment(&place, "lives");
            lives.variables.extend(odd.map(|name| (name.to_owned(), "h".to_owned())));
            let mut site = Site::new(&posting);
            site.starts(lives.clone()).await.expect("it is started");
            is_up(&place, &lives).await;
            drop(site);
            // As it was before the process was known.
            let mut begun = record(&posting, &lives.id);
            let known = begun.clone();
            let fields = begun.as_object_mut().expect("an object");
            fields.retain(|name, _| name != "pid" && name != "started");
            let (path, bytes) = (posting.folder.join(format!("{}.begun", lives.id)), begun.to_string());
            std::fs::write(&path, bytes).expect("it is written");
            std::fs::remove_file(posting.folder.join(format!("{}.json", lives.id))).expect("it was there");
            let mut site = Site::new(&posting);
            let (id, key) = (lives.id.clone(), lives.key.clone());
            assert_eq!(site.looks().await, [Change::Found { id, key }]);
            assert_eq!((record(&posting, &lives.id), path.exists()), (known, false));
            assert!(site.line.stop(&lives.id));
            site.ends(&lives.id, true).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_was_never_started_is_looked_for_and_then_given_up() {
        let place = Place::new();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned()] }));
        let mut site = Site::new(&posting);
        let begun = |boot: &str| {
            let id = uuid::Uuid::new_v4();
            let path = posting.folder.join(format!("{id}.begun"));
            let begun = serde_json::json!({"id": id.to_string(), "key": "k", "boot": boot}).to_string();
            std::fs::write(&path, begun).expect("it is written");
            path
        };
        let crate::domain::journal::Boot(boot) = crate::host::journal::this_boot();
        let (fresh, of_an_earlier_boot) = (begun(&boot), begun("another"));
        assert_eq!(site.looks().await, []);
        assert!(fresh.exists(), "it may be just being started");
        assert!(!of_an_earlier_boot.exists());
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::options()
            .append(true)
            .open(&fresh)
            .and_then(|file| file.set_modified(long_ago))
            .expect("it can be set");
        assert_eq!(site.looks().await, []);
        assert!(!fresh.exists());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn one_that_dies_while_no_controller_looks_is_told_of_by_the_next_one_once() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] }));
        let mut site = Site::new(&posting);
        let lives = assignment(&place, "lives");
        site.starts(lives.clone()).await.expect("it is started");
        is_up(&place, &lives).await;
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
        timeout(LONGEST, dying).await.expect("it dies");
        let mut site = Site::new(&posting);
        let end = site.ends(&lives.id, false).await;
        assert!(end.how.contains("no controller") && end.last_words.contains("hello from"), "{end:?}");
        assert_eq!(site.looks().await, []);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_control_group_that_nothing_is_written_down_of_is_emptied_and_removed() {
        let place = Place::new();
        let worker = place.path().join("worker").display().to_string();
        let posting = place.posting("core", Means::Subprocess(Program { command: vec!["/bin/sh".to_owned(), worker] }));
        let name = format!("{} {}", posting.pool, posting.folder.display());
        let groups = match crate::host::containment::ControlGroups::establish(&name) {
            Ok(groups) => groups,
            Err(why) => {
                assert!(std::env::var_os("CI").is_none(), "no control groups: {why}");
                return println!("MISSING: control groups, so nothing was tried: {why}");
            }
        };
        let group = groups.make("unwritten").expect("a control group");
        let (shell, before) = group.before();
        let mut child = tokio::process::Command::new(shell);
        let mut child = child.args(before).args(["sleep", "1000"]).spawn().expect("it is started");
        let mut site = Site::new(&posting);
        assert_eq!(site.looks().await, []);
        assert!(matches!(child.try_wait(), Ok(None)), "it may be just being started");
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        std::fs::File::open(group.folder()).expect("it is there").set_modified(long_ago).expect("it can be set");
        let ending = async {
            while group.folder().exists() {
                assert_eq!(site.looks().await, []);
            }
        };
        timeout(LONGEST, ending).await.expect("it is ended");
        assert!(!child.wait().await.expect("it ends").success());
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_commands_of_the_example_are_a_driver() {
        let place = Place::new();
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/drivers/processes.py");
        let notes = place.path().join("notes").display().to_string();
        let command =
            vec![example.to_owned(), notes, "/bin/sh".to_owned(), place.path().join("worker").display().to_string()];
        let commands = Commands { list: command.clone(), start: command.clone(), stop: command };
        conforms(&place, Means::Exec(commands)).await;
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
        let place = Place::new();
        let path = |name: &str| place.path().join(name).display().to_string();
        let (socket, worker) = (path("docker.sock"), path("worker"));
        let (_docker, _) = StandIn::start("docker", &[&socket, "/bin/sh", &worker]);
        let containers = Containers {
            host: format!("unix://{socket}"),
            image: "worker:1".to_owned(),
            command: Vec::new(),
            network: Some("host".to_owned()),
        };
        conforms(&place, Means::Docker(containers)).await;
    }

    /// The stand-in reads the unit of the example, but for where things are.
    #[tokio::test(flavor = "multi_thread")]
    async fn instances_of_a_template_unit_are_a_driver() {
        let place = Place::new();
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
        let template = Template {
            unit: "worker".to_owned(),
            systemctl: vec![stand_in, units.join("worker@.service").display().to_string()],
        };
        conforms(&place, Means::Systemd(template)).await;
    }
}
