//! Runs each hostile payload many times at each level.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use journeyman::handler::artifact::{ArtifactDeclaration, ArtifactKind, Optionality};
use journeyman::handler::artifact_collector::CollectedArtifact;
use journeyman::handler::log::LogLimits;
use journeyman::handler::process::RunLimits;
use journeyman_domain::outcome::Cleanup;
use journeyman_platform::host::containment::{Containment, ContainmentConfig, ContainmentLevel, ResourceLimits};
use tokio::task::JoinSet;

use crate::bench::Bench;
use crate::payload_scan::{PayloadScan, zombies};
use crate::scopes::start_with;
use crate::{LEVELS, Report, at, required};

/// Time in which rounds of one level begin.
const LEVEL_TIME: Duration = Duration::from_secs(20);
/// Concurrent payloads.
const AT_ONCE: usize = 8;
/// Limit for each run.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);
const DISK: u64 = 1 << 20;

/// How a payload ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Its leader exits.
    Exits,
    /// It is terminated once it has printed `ready`.
    Terminated,
}

/// Other payloads may run at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Company {
    Any,
    /// At the level of process groups it can be found only if no other payload runs.
    NoneInGroups,
    /// Alone at every level.
    None,
}

struct Payload {
    name: &'static str,
    script: &'static str,
    end: End,
    company: Company,
    also: fn(&Bench, &Context<'_>) -> Result<(), String>,
}

struct Context<'a> {
    description: &'a str,
    level: ContainmentLevel,
}

const fn payload(name: &'static str, end: End, script: &'static str) -> Payload {
    Payload { name, script, end, company: Company::Any, also: |_, _| Ok(()) }
}

/// `$M` is a unique duration for the run's `sleep`; the file `up` says that the escape has happened.
const UNTIL_UP: &str = "until_up() { while [ ! -e up ]; do :; done; }\n";
/// `leave` moves its process to the parent of all claims' control groups, and creates a file.
pub(crate) const LEAVE: &str = "leave() {
    while read -r _ _ _ root point rest; do
        case \"$rest\" in *' - cgroup2 '*) groups=$point above=${root%/};; esac
    done </proc/self/mountinfo
    own=$(sed -n 's/^0:://p' /proc/self/cgroup)
    case \"$own\" in */claim-*) echo 0 >\"$groups${own#\"$above\"}/../../cgroup.procs\" && echo >left;; esac
}
";

const PAYLOADS: [Payload; 29] = [
    payload("setsid", End::Exits, "setsid sh -c 'echo >up; exec sleep $0' $M >/dev/null 2>&1 & until_up"),
    payload("double fork", End::Exits, "( ( sh -c 'echo >up; exec sleep $0' $M >/dev/null 2>&1 & ) & ); until_up"),
    payload(
        "double fork into another session",
        End::Exits,
        "( ( setsid sh -c 'echo >up; exec sleep $0' $M >/dev/null 2>&1 & ) & ); until_up",
    ),
    payload("ignores TERM", End::Terminated, "trap '' TERM HUP INT; echo ready; while :; do sleep 0.02; done"),
    payload(
        "closes its output and stays",
        End::Terminated,
        "echo ready; exec >/dev/null 2>&1 </dev/null; exec sleep $M",
    ),
    payload(
        "fork bomb, of a hundred",
        End::Terminated,
        "f() { if [ $1 -gt 0 ]; then f $(($1 - 1)) & f $(($1 - 1)) & wait; else exec sleep $M; fi; }; echo ready; f 5",
    ),
    payload("a line without end", End::Terminated, "echo ready; exec cat /dev/zero"),
    Payload {
        also: no_link_is_followed,
        ..payload(
            "a farm of symbolic links",
            End::Exits,
            "mkdir out; for i in 1 2 3 4 5 6 7 8; do ln -s /etc/passwd out/f$i; ln -s / out/d$i; done; ln -s ../.. out/up",
        )
    },
    payload("a grandchild holds the pipe", End::Exits, "( sleep $M & ); exit 0"),
    payload("stops itself", End::Terminated, "echo ready; kill -STOP $$"),
    Payload {
        company: Company::NoneInGroups,
        ..payload(
            "a daemon without an environment",
            End::Exits,
            "( env -i setsid sh -c 'echo >up; exec sleep $0' $M >/dev/null 2>&1 & ); until_up",
        )
    },
    Payload {
        company: Company::NoneInGroups,
        ..payload(
            "a daemon under the name of another claim",
            End::Exits,
            "( JOURNEYMAN_CLAIM_COOKIE=forged setsid sh -c 'echo >up; exec sleep $0' $M >/dev/null 2>&1 & ); until_up",
        )
    },
    Payload {
        also: it_has_left,
        ..payload(
            "moves into another control group",
            End::Exits,
            "( leave; exec setsid sh -c 'echo >up; exec sleep $0' $M ) >/dev/null 2>&1 & until_up",
        )
    },
    Payload {
        company: Company::None,
        also: it_has_left,
        ..payload(
            "moves into another control group and clears its environment",
            End::Exits,
            "( leave; exec env -i setsid sh -c 'echo >up; exec sleep $0' $M ) >/dev/null 2>&1 & until_up",
        )
    },
    payload("stops its own group", End::Terminated, "sleep $M & sleep $M & echo ready; kill -STOP 0"),
    payload(
        "holds a sibling by ptrace",
        End::Terminated,
        // PTRACE_ATTACH on x86-64; elsewhere another call that fails.
        "setsid sleep $M & exec perl -e '$| = 1; syscall(101, 16, $ARGV[0], 0, 0); print \"ready\\n\"; sleep' $!",
    ),
    Payload {
        also: its_size_is_logged,
        ..payload("fills its folder", End::Exits, "head -c 3000000 /dev/zero >fill; setsid sleep $M >/dev/null 2>&1 &")
    },
    payload(
        "a folder deeper than a path can be",
        End::Exits,
        "n=dddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddddd; \
         for i in 1 2 3 4 5 6 7 8 9 10; do for j in 1 2 3 4 5; do mkdir $n; cd $n; done; done; exec setsid sleep $M >/dev/null 2>&1 &",
    ),
    payload("removes its own folder", End::Exits, "setsid sleep $M >/dev/null 2>&1 & rm -rf \"$TASK_WORKDIR\""),
    payload("makes its directory unreadable", End::Exits, "setsid sleep $M >/dev/null 2>&1 & chmod 000 ."),
    payload("many short processes", End::Exits, "i=0; while [ $i -lt ${MANY:-60} ]; do ( : & ); i=$((i + 1)); done"),
    payload(
        "forks all the time",
        End::Terminated,
        "trap '' TERM; exec perl -e '$| = 1; print \"ready\\n\"; $SIG{TERM} = \"IGNORE\"; while (1) { my $p = fork; exit if $p; select(undef, undef, undef, 0.0005); }' $M",
    ),
    payload(
        "forks all the time, each time into another session",
        End::Exits,
        "perl -MPOSIX -e 'exit if fork; open(my $up, \">up\"); close $up; \
         while (1) { my $p = fork; exit if $p; POSIX::setsid(); select(undef, undef, undef, 0.001); }' $M >/dev/null 2>&1; until_up",
    ),
    payload(
        "goes on in a thread when its first has ended",
        End::Exits,
        "setsid python3 -c 'import ctypes, threading, time
t = threading.Thread(target=lambda: (open(\"up\", \"w\").close(), time.sleep(100000)))
t.start()
ctypes.CDLL(None).pthread_exit(None)' $M >/dev/null 2>&1 & until_up",
    ),
    payload(
        "a name that is no text",
        End::Exits,
        "perl -MPOSIX -e 'exit if fork; exit if fork; POSIX::setsid(); open(my $c, \">\", \"/proc/self/comm\"); print $c \"\\xff\\xfe\"; close $c; open(my $up, \">up\"); close $up; sleep' $M >/dev/null 2>&1 & until_up",
    ),
    payload("nohup in another session", End::Exits, "nohup setsid sleep $M >/dev/null 2>&1 & sleep 0.01"),
    payload(
        "writes to descriptor 3 after its exit",
        End::Exits,
        "( while :; do echo '{\"type\":\"step\"}' >&3; sleep 0.01; done ) >/dev/null 2>&1 & exit 0",
    ),
    Payload {
        name: "leaves its group and continues in a thread",
        script: "exec python3 -c 'import ctypes, os, signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    time.sleep(100000)
os.setpgid(child, child)
os.setpgid(0, child)
t = threading.Thread(target=lambda: (print(\"ready\", flush=True), time.sleep(100000)))
t.start()
ctypes.CDLL(None).pthread_exit(None)' $M",
        end: End::Terminated,
        company: Company::Any,
        also: it_is_killed_at_once,
    },
    payload(
        "starts a daemon on SIGTERM",
        End::Terminated,
        "trap 'setsid sleep $M >/dev/null 2>&1 & exit 0' TERM; echo ready; while :; do sleep 0.02; done",
    ),
];

fn no_link_is_followed(bench: &Bench, _: &Context<'_>) -> Result<(), String> {
    let kind = ArtifactKind::Directory { path: "out".into(), content_type: None };
    let declaration =
        ArtifactDeclaration { optionality: Optionality::Optional, ..ArtifactDeclaration::new("out", kind) };
    bench.context.artifacts().declare(declaration).map_err(|error| error.to_string())?;
    let items = bench.context.artifacts().collect(bench.workdir()).map_err(|error| error.to_string())?;
    let found = items.filter(|item| matches!(item, CollectedArtifact::Found(..))).count();
    if found == 0 { Ok(()) } else { Err(format!("{found} files were read through links")) }
}

fn its_size_is_logged(_: &Bench, run: &Context<'_>) -> Result<(), String> {
    if run.description.contains("directory exceeded") {
        Ok(())
    } else {
        Err(format!("its size is not logged: {}", run.description))
    }
}

fn it_has_left(bench: &Bench, run: &Context<'_>) -> Result<(), String> {
    let may = run.level != ContainmentLevel::ProcessGroup && rustix::process::geteuid().is_root();
    if may && !bench.workdir().join("left").exists() { Err("it did not leave its group".to_owned()) } else { Ok(()) }
}

fn it_is_killed_at_once(_: &Bench, run: &Context<'_>) -> Result<(), String> {
    if run.description.contains("although it was killed") {
        Err(format!("it was not killed at once: {}", run.description))
    } else {
        Ok(())
    }
}

/// Unique to this run; no other process sleeps for it.
fn mark() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}{:06}", 70_000 + std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

async fn once(payload: &Payload, containment: &Containment) -> Result<(), String> {
    let mark = mark();
    let bench = Bench::with_limits(LogLimits { head_bytes: 64 << 10, tail_bytes: 64 << 10 });
    let scope = containment.new_scope();
    let bench = bench.within(scope.clone());
    let scan =
        PayloadScan { cookie: scope.record().cookie.into(), mark: mark.clone(), folder: bench.workdir().to_owned() };
    let script = format!("{UNTIL_UP}{LEAVE}{}", payload.script);
    let (_reader, writer) = rustix::pipe::pipe().map_err(|error| error.to_string())?;
    let running = start_with(&bench, &scope, &["sh", "-c", &script], &[("M", &mark)], writer).await;
    let running = running.map_err(|error| format!("not started: {error}"))?;
    let bounds = RunLimits { run_time: Some(RUN_TIMEOUT), termination_grace: Duration::from_millis(30) };
    let finish = running.finish(bounds, &bench.context);
    let ended = match payload.end {
        End::Exits => finish.await,
        End::Terminated => {
            let (ended, ()) = tokio::join!(finish, async {
                bench.logged("ready").await;
                bench.cancel(Duration::from_secs(20));
            });
            ended
        }
    };
    let ended = ended.map_err(|error| format!("cannot wait for it: {error}"))?;
    let mut emptiness = scope.clean_up().await;
    // On a stalled machine a killed process may take longer to exit than a worker waits.
    if emptiness == Cleanup::Incomplete && tokio::time::timeout(RUN_TIMEOUT / 2, scope.wait_cleaned_up()).await.is_ok()
    {
        emptiness = Cleanup::Complete;
    }
    let left = scan.running();
    if !left.is_empty() || emptiness != Cleanup::Complete {
        return Err(format!("{emptiness:?}, survivors {left:?}, {ended:?}"));
    }
    if let Some(folder) = scope.cgroup()
        && folder.exists()
    {
        return Err(format!("{} was not removed", folder.display()));
    }
    (payload.also)(&bench, &Context { description: &ended.describe(), level: containment.level() })?;
    drop(std::fs::set_permissions(bench.workdir(), std::os::unix::fs::PermissionsExt::from_mode(0o700)));
    removed(bench.workdir())
}

/// The worker does so after a task.
fn removed(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("its directory was not removed: {error}"))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

pub(crate) async fn run(filter: &str) -> Report {
    let mut report = Report::default();
    let runs: Option<usize> = std::env::var("JOURNEYMAN_CONTAINMENT_RUNS").ok().and_then(|runs| runs.parse().ok());
    let rounds = runs.map(|runs| runs.div_ceil(PAYLOADS.len() * LEVELS.len()));
    for level in LEVELS {
        let name = format!("hostile payloads at level {}", level.as_str());
        match at_with_disk(level) {
            Ok(containment) => {
                let outcome = tokio::select! {
                    outcome = level_holds(&name, &containment, rounds, filter) => outcome,
                    () = containment.reap_orphans() => unreachable!("it does not end"),
                };
                report.check(&name, outcome);
            }
            Err(why) => report.missing.push(why),
        }
    }
    if !rustix::process::geteuid().is_root() {
        report.missing.push("payloads that surely get into another control group: only root's do".to_owned());
    }
    if "first process".contains(filter) || filter.is_empty() {
        first_process(&mut report).await;
    }
    report
}

fn at_with_disk(level: ContainmentLevel) -> Result<Containment, String> {
    at(level, "probe")?;
    let limits = ResourceLimits { disk: Some(DISK), ..ResourceLimits::default() };
    let wanted = ContainmentConfig { requirement: required(level), limits };
    let name = format!("hostile-{}-{}", level.as_str(), std::process::id());
    Containment::probe(&name, wanted).map_err(|error| error.to_string())
}

async fn level_holds(name: &str, containment: &Containment, rounds: Option<usize>, filter: &str) -> Result<(), String> {
    let containment = Arc::new(containment.clone());
    let began = Instant::now();
    let (mut runs, mut failed) = (0, Vec::new());
    let wanted = |payload: &&Payload| filter.is_empty() || name.contains(filter) || payload.name.contains(filter);
    let alone = |payload: &Payload| match payload.company {
        Company::Any => false,
        Company::NoneInGroups => containment.level() == ContainmentLevel::ProcessGroup,
        Company::None => true,
    };
    let (lonely, social): (Vec<_>, Vec<_>) = PAYLOADS.iter().filter(wanted).partition(|payload| alone(payload));
    let mut together = JoinSet::new();
    // Each payload once; again as often as is asked for, or while there is time.
    let again = |number: usize, payloads: usize| {
        number < payloads || rounds.map_or_else(|| began.elapsed() < LEVEL_TIME, |rounds| number < rounds * payloads)
    };
    for number in (0..).take_while(|number| !social.is_empty() && again(*number, social.len())) {
        let payload = social[number % social.len()];
        while together.len() >= AT_ONCE {
            failed.extend(together.join_next().await.and_then(ended));
        }
        let containment = Arc::clone(&containment);
        together.spawn(async move { bounded(payload, &containment).await });
        runs += 1;
    }
    while let Some(one) = together.join_next().await {
        failed.extend(ended(one));
    }
    for (_, payload) in (0..).zip(lonely.iter().cycle()).take_while(|(number, _)| again(*number, lonely.len())) {
        failed.extend(bounded(payload, &containment).await.err());
        runs += 1;
    }
    println!("        {name}: {runs} runs, {} survivors, {:.1} s", failed.len(), began.elapsed().as_secs_f64());
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n        ")) }
}

fn ended(one: Result<Result<(), String>, tokio::task::JoinError>) -> Option<String> {
    match one {
        Ok(outcome) => outcome.err(),
        Err(error) => Some(error.to_string()),
    }
}

async fn bounded(payload: &Payload, containment: &Containment) -> Result<(), String> {
    let outcome = tokio::time::timeout(RUN_TIMEOUT, once(payload, containment)).await;
    outcome
        .unwrap_or_else(|_| Err("not finished after a minute".to_owned()))
        .map_err(|why| format!("{}: {why}", payload.name))
}

/// The worker as PID 1 of a container.
async fn first_process(report: &mut Report) {
    let name = "the first process of a container holds and reaps payloads";
    let program = std::env::current_exe().unwrap();
    let mut command = tokio::process::Command::new("unshare");
    command.args(["--pid", "--fork", "--mount-proc"]).arg(program).arg("--first-process");
    match command.output().await {
        Ok(output) if output.status.success() => report.check(name, Ok(())),
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("unshare:") => {
            report.missing.push(format!("a process namespace: {}", String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(output) => report.check(name, Err(String::from_utf8_lossy(&output.stdout).into_owned())),
        Err(error) => report.missing.push(format!("unshare: {error}")),
    }
}

/// Started by [`first_process`].
pub(crate) async fn as_first_process() -> Report {
    let mut report = Report::default();
    report
        .check("this is the first process", if std::process::id() == 1 { Ok(()) } else { Err("it is not".to_owned()) });
    let containment = at(ContainmentLevel::ProcessGroup, "first").expect("there are always process groups");
    let all = async {
        for payload in &PAYLOADS {
            report.check(
                payload.name,
                bounded(payload, &containment).await.or_else(|why| {
                    // Without a disk limit.
                    if why.contains("size is not logged") { Ok(()) } else { Err(why) }
                }),
            );
        }
        let reaped = async {
            while zombies() > 0 {
                tokio::task::yield_now().await;
            }
        };
        let reaped = tokio::time::timeout(RUN_TIMEOUT, reaped).await.map_err(|_| format!("{} zombies", zombies()));
        report.check("no zombie remains", reaped);
    };
    tokio::select! {
        () = all => {}
        () = containment.reap_orphans() => {}
    }
    report
}
