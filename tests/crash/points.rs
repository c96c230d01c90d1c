//! Kills workers at each of the crash points of `host::crash_points`, in both dialects, with control groups and without. The next
//! worker recovers, and is killed as well.
//!
//! `JOURNEYMAN_CRASH_RUNS` is the number of kills at each point. Without it, the test ends after a minute, and begins at another
//! point each day.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use journeyman::source::taskcluster::Api;
use journeyman_domain::id::TaskId;
use journeyman_platform::host::crash_points::CLAIM_CRASH_POINTS;
use journeyman_services::queue::Db;
use rustix::process::Signal;
use serde_json::Value;

use crate::crash::checker::{Accepted, Final, History, Line, Run, check};
use crate::crash::create_task;
use crate::crash::process::{Process, Variable};
use crate::support::task_queue::{TaskQueue, shell};
use crate::support::{Repeats, seed};

/// Reached at every start, or at a start that recovers claims.
const AT_THE_START: [&str; 5] =
    ["startup-journal-read", "startup-processes-killed", "startup-dirs-cleared", "journal-before-rename", "taken-over"];
/// Reached where messages are deleted.
const OF_MESSAGES: [&str; 2] = ["before-delete", "after-delete"];
/// Attempts until a worker reaches its point.
const ATTEMPTS: usize = 3;
/// Kills at each point, where there is time for them.
const RUNS: usize = 4;

/// A dialect and a level of containment.
#[derive(Debug, Clone, Copy)]
struct Stage {
    name: &'static str,
    protocol: &'static str,
    containment: &'static str,
}

const STAGES: [Stage; 4] = [
    Stage { name: "a", protocol: "claim-work", containment: "auto" },
    Stage { name: "b", protocol: "azure", containment: "auto" },
    Stage { name: "c", protocol: "claim-work", containment: "group" },
    Stage { name: "d", protocol: "azure", containment: "group" },
];

impl Stage {
    /// The points in an order that leaves open claims wherever that matters.
    fn deaths(self, runs: usize, seed: u64) -> Vec<&'static str> {
        let azure = self.protocol == "azure";
        // The runs of each point are divided among the stages that reach it.
        let share = |point: &str| {
            let able = |stage: &&Self| stage.protocol == "azure" || !OF_MESSAGES.contains(&point);
            let names: Vec<&str> = STAGES.iter().filter(able).map(|stage| stage.name).collect();
            let rank = names.iter().position(|name| *name == self.name).unwrap_or(names.len());
            runs / names.len() + usize::from(rank < runs % names.len())
        };
        let mut others: Vec<&str> = Vec::new();
        let mut starts: Vec<&str> = Vec::new();
        for round in 0..runs {
            for point in CLAIM_CRASH_POINTS.iter().copied().filter(|point| azure || !OF_MESSAGES.contains(point)) {
                if round < share(point) {
                    if AT_THE_START.contains(&point) { starts.push(point) } else { others.push(point) }
                }
            }
        }
        let first = usize::try_from(seed).expect("64 bits") % others.len();
        others.rotate_left(first);
        let mut deaths = Vec::new();
        let mut starts = starts.into_iter().peekable();
        for point in others {
            deaths.push(point);
            // These always leave an open entry.
            if ["prepared", "spawned", "exited", "before-upload", "after-upload", "before-report"].contains(&point) {
                deaths.extend(starts.next());
            }
        }
        assert!(starts.peek().is_none(), "no room for all of them");
        deaths
    }
}

/// A payload of several steps, with a process that leaves the group and would record that it survived.
fn payload(lines: &Path, point: &str, stage: Stage) -> Value {
    let seconds = if ["reclaimed", "releasing"].contains(&point) { "4" } else { "0.02" };
    // A process without parents and environment is found only by its control group.
    let leave = if stage.containment == "group" { "setsid" } else { "env -i PATH=\"$PATH\" setsid" };
    let lines = lines.display();
    shell(&format!(
        "r=$TASK_ID/$RUN_ID; echo start $r >>{lines}; {leave} sh -c 'sleep 5; echo step '$r' >>{lines}' & \
         sleep {seconds}; echo step $r >>{lines}; echo done; echo end $r >>{lines}"
    ))
}

struct Scene<'a> {
    stage: Stage,
    folder: &'a Path,
    root_url: &'a str,
    api: Api,
    created: Vec<TaskId>,
    log: Vec<String>,
}

impl Scene<'_> {
    fn lines(&self) -> PathBuf {
        self.folder.join("lines")
    }

    async fn create(&mut self, count: usize, point: &str) {
        for _ in 0..count {
            let task = create_task(&self.api, &payload(&self.lines(), point, self.stage)).await;
            self.created.push(task);
        }
    }

    fn worker(&self, more: &[Variable<'_>]) -> Process {
        let name = format!("crash-{}", self.stage.name);
        let own = [
            ("JOURNEYMAN__WORKER__ID", name.as_str()),
            ("JOURNEYMAN__HOST__CONTAINMENT", self.stage.containment),
            ("JOURNEYMAN__WORKER__TERMINATION_GRACE", "1s"),
            // A worker that never reaches its point exits nevertheless.
            ("JOURNEYMAN__WORKER__EXIT_WHEN_IDLE", "15s"),
        ];
        let variables: Vec<Variable<'_>> = own.iter().chain(more).copied().collect();
        Process::worker_with(self.folder, self.root_url, self.stage.protocol, &variables)
    }

    /// Runs a worker that is killed at the point, when it reaches it for the first, second or third time. Repeats if the worker
    /// never does, because the machine stalled and its claims expired.
    async fn crash_at(&mut self, point: &str, number: usize) {
        let once = AT_THE_START.contains(&point) || ["reclaimed", "releasing"].contains(&point);
        let times = if once { 1 } else { 1 + number % 3 };
        for left in (0..ATTEMPTS).rev() {
            let mut worker = self.run_until_exit(point, times).await;
            let died = worker.died_of();
            let killed = died == Some(Signal::KILL.as_raw());
            let again = left > 0 && died.is_none();
            assert!(killed || again, "{:?} at {point}:{times}: {died:?}, {:#?}", self.stage, worker.log);
            self.log.append(&mut worker.log);
            if killed {
                return;
            }
            if AT_THE_START.contains(&point) {
                // It left nothing to recover.
                let mut other = self.run_until_exit("prepared", 1).await;
                other.died_of();
                self.log.append(&mut other.log);
            }
        }
    }

    /// Runs a worker that is killed when it reaches a point for the given time.
    async fn run_until_exit(&mut self, point: &str, times: usize) -> Process {
        if !AT_THE_START.contains(&point) {
            self.create(times, point).await;
        }
        let at = format!("{point}:{times}");
        let mut worker = self.worker(&[("JOURNEYMAN_CRASH_POINT", &at)]);
        if point == "releasing" {
            worker.until("\"claimed\"").expect("it claims");
            worker.signal(Signal::QUIT);
        }
        worker
    }

    /// Runs the last worker until all tasks are resolved.
    async fn finish(&mut self) {
        let mut open = BTreeSet::new();
        for task in &self.created {
            let status = self.api.task_status(task).await.expect("a status");
            if matches!(status["state"].as_str(), Some("pending" | "running")) {
                open.insert(task.to_string());
            }
        }
        let mut worker = self.worker(&[]);
        while !open.is_empty() {
            let Some(line) = worker.until("\"reported") else {
                // The worker does not know an outcome that the queue has.
                for task in &self.created {
                    let status = self.api.task_status(task).await.expect("a status");
                    let log = &worker.log;
                    assert_eq!(status["state"], "completed", "the worker completes every task: {status}, {log:#?}");
                }
                break;
            };
            if let Some(Accepted { run, outcome }) = accepted(&line)
                && outcome == "completed"
            {
                open.remove(&run.task);
            }
        }
        self.log.extend(worker.leave());
    }

    async fn history(&self) -> History {
        let lines = std::fs::read_to_string(self.lines()).expect("payloads have written");
        let mut queue = BTreeMap::new();
        for task in &self.created {
            let status = self.api.task_status(task).await.expect("a status");
            let text = |run: &Value, key: &str| run[key].as_str().unwrap_or_default().to_owned();
            let runs = status["runs"].as_array().expect("runs").iter();
            let runs = runs.map(|run| Final { state: text(run, "state"), reason: text(run, "reasonResolved") });
            queue.insert(task.to_string(), runs.collect());
        }
        History {
            created: self.created.iter().map(ToString::to_string).collect(),
            lines: lines.lines().map(read_line).collect(),
            accepted: self.log.iter().filter_map(|line| accepted(line)).collect(),
            queue,
            left: processes_of(self.folder),
        }
    }
}

fn read_line(line: &str) -> Line {
    let (what, run) = line.split_once(' ').expect("two words");
    let run = Run::read(run).expect("a run");
    match what {
        "start" => Line::Start(run),
        "step" => Line::Step(run),
        "end" => Line::End(run),
        other => unreachable!("{other}"),
    }
}

/// Parses an accepted outcome from a line of a worker's log.
fn accepted(line: &str) -> Option<Accepted> {
    let line: Value = serde_json::from_str(line).ok()?;
    let field = |key: &str| line["fields"][key].as_str().or_else(|| line[key].as_str());
    if !field("message")?.starts_with("reported") {
        return None;
    }
    Some(Accepted { run: Run::read(field("claim.run")?)?, outcome: field("outcome")?.to_owned() })
}

/// Processes with this directory in their command line or environment.
fn processes_of(folder: &Path) -> Vec<i32> {
    let folder = folder.display().to_string();
    let names = |pid: &i32| {
        let of = |file: &str| std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let texts = [of("cmdline"), of("environ")].concat();
        String::from_utf8_lossy(&texts).contains(&folder)
    };
    let entries = std::fs::read_dir("/proc").expect("there is /proc").flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| *pid != std::process::id().cast_signed()).filter(names).collect()
}

/// A queue whose messages become visible again soon.
pub(crate) async fn queue_in(folder: &Path, claim_timeout: Duration) -> TaskQueue {
    TaskQueue::start(folder, |config| {
        config.db = Db::File(folder.join("queue.db"));
        config.claim_timeout = claim_timeout;
        config.claim_delay = Duration::from_millis(200);
        config.visibility_timeout = Duration::from_secs(5);
    })
    .await
}

async fn run_stage(stage: Stage, repeats: Repeats, seed: u64) -> usize {
    let folder = tempfile::tempdir().expect("a folder");
    let TaskQueue { service: queue, api } = queue_in(folder.path(), Duration::from_secs(5)).await;
    let root_url = queue.root_url().to_owned();
    let mut scene =
        Scene { stage, folder: folder.path(), root_url: &root_url, api, created: Vec::new(), log: Vec::new() };
    let planned = stage.deaths(repeats.count.unwrap_or(RUNS), seed);
    let mut passed: BTreeMap<&str, usize> = BTreeMap::new();
    let mut deaths = 0;
    for point in &planned {
        if repeats.count.is_none() && !repeats.again(deaths) {
            break;
        }
        deaths += 1;
        let number = passed.entry(point).or_default();
        *number += 1;
        scene.crash_at(point, *number - 1).await;
    }
    scene.finish().await;
    let history = scene.history().await;
    let faults = check(&history);
    let runs: usize = history.queue.values().map(Vec::len).sum();
    println!(
        "crash: {deaths} deaths at {} places ({}, containment {}), {} tasks in {runs} runs, {} outcomes heard of, {} faults",
        passed.len(),
        stage.protocol,
        stage.containment,
        history.created.len(),
        history.accepted.len(),
        faults.len()
    );
    assert_eq!(faults, [], "{:#?}", scene.log.iter().filter(|line| concerns(line, &faults)).collect::<Vec<_>>());
    queue.stop().await;
    deaths
}

/// True for a line of a log about a task with a fault.
fn concerns(line: &str, faults: &[crate::crash::checker::Fault]) -> bool {
    faults.iter().any(|fault| {
        let fault = format!("{fault:?}");
        line.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word.len() == 22 && fault.contains(word))
    })
}

#[test]
fn a_worker_killed_at_any_crash_point_loses_nothing_and_reports_nothing_twice() {
    let (repeats, seed) = (Repeats::new("JOURNEYMAN_CRASH_RUNS", Duration::from_secs(60)), seed());
    assert!(CLAIM_CRASH_POINTS.len() >= 12);
    let deaths: usize = std::thread::scope(|scope| {
        let stages = STAGES.map(|stage| {
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
                runtime.expect("a runtime").block_on(run_stage(stage, repeats, seed))
            })
        });
        stages.into_iter().map(|stage| stage.join().expect("it holds")).sum()
    });
    println!("crash: {deaths} deaths, of {} places", CLAIM_CRASH_POINTS.len());
    if let Some(runs) = repeats.count {
        assert_eq!(deaths, runs * CLAIM_CRASH_POINTS.len());
    }
}
