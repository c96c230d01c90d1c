//! A payload's environment, and the errors of a failed start, are the same at each level.

use std::io;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use journeyman::handler::environment;
use journeyman::handler::process::{Launch, ProcessStatus, RunLimits, RunningProcess};
use journeyman_domain::outcome::Cleanup;
use journeyman_platform::host::containment::{
    Containment, ContainmentConfig, ContainmentLevel, ProcessScope, ResourceLimits,
};

use rustix::pipe::pipe;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

use crate::bench::Bench;
use crate::hostile::LEAVE;
use crate::{LEVELS, Report, at};

const BOUNDS: RunLimits =
    RunLimits { run_time: Some(Duration::from_secs(60)), termination_grace: Duration::from_secs(10) };

pub(crate) async fn run(filter: &str) -> Report {
    let mut report = Report::default();
    for level in LEVELS {
        let Ok(containment) = at(level, "plain") else { continue };
        let cases: [(&str, Result<(), String>); 7] = [
            (
                "a payload has its own environment and descriptors, and none of the worker",
                environment_of_a_payload(&containment).await,
            ),
            ("a failed start has the error of the system", errors_are_the_same(&containment).await),
            (
                "a warning of the dynamic loader does not end the payload",
                a_missing_preload_is_a_warning(&containment).await,
            ),
            ("variables of the dynamic loader apply to the payload alone", the_loaders_variables(&containment).await),
            ("two processes of a claim do not end each other", two_processes(&containment).await),
            ("a dropped payload is killed", dropped(&containment).await),
            (
                "processes that a handler starts are not taken for those of a payload",
                processes_of_a_handler(&containment).await,
            ),
        ];
        for (name, outcome) in cases.into_iter().filter(|(name, _)| name.contains(filter)) {
            report.check(&format!("{}: {name}", level.as_str()), outcome);
        }
    }
    if "ambiguous".contains(filter) {
        report
            .check("process-group: an orphan that may belong to another claim is not killed", ambiguous_orphan().await);
    }
    if "ambiguous".contains(filter)
        && let Ok(containment) = at(ContainmentLevel::CgroupKill, "escaped_process")
    {
        let name = "a process that left its control group is killed when no task remains that may own it";
        report.check(&format!("cgroup-kill: {name}"), escaped_process(&containment).await);
    }
    if "limits".contains(filter) {
        limits(&mut report).await;
    }
    report
}

pub(crate) async fn start(bench: &Bench, within: &ProcessScope, argv: &[&str]) -> io::Result<RunningProcess> {
    start_with(bench, within, argv, &[], pipe()?.1).await
}

/// Starts a payload whose descriptor 3 is `channel`.
pub(crate) async fn start_with(
    bench: &Bench,
    within: &ProcessScope,
    argv: &[&str],
    variables: &[(&str, &str)],
    channel: OwnedFd,
) -> io::Result<RunningProcess> {
    let argv: Vec<String> = argv.iter().map(|&argument| argument.to_owned()).collect();
    let mut env = environment::for_task(&environment::Variables::new(), &bench.context);
    env.insert("ODD-name".to_owned(), "kept".to_owned());
    env.extend(variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    let launch = Launch {
        argv: &argv,
        env: &env,
        workdir: bench.workdir(),
        input: Stdio::null(),
        message_channel: Some(channel),
        scope: within,
        user: None,
    };
    RunningProcess::start(launch).await
}

fn bench(scope: &ProcessScope) -> Bench {
    Bench::new().within(scope.clone())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: T, wanted: T) -> Result<(), String> {
    if found == wanted { Ok(()) } else { Err(format!("{what}: {found:?} instead of {wanted:?}")) }
}

/// A handler in Rust may start processes by itself: one that has exited, and one that runs while a claim ends.
async fn processes_of_a_handler(containment: &Containment) -> Result<(), String> {
    let (tell, ready) = mpsc::channel::<()>();
    let (go, wait) = mpsc::channel::<()>();
    let handler = std::thread::spawn(move || -> io::Result<[Option<i32>; 2]> {
        let mut ended = Command::new("sh").args(["-c", "exit 7"]).spawn()?;
        let mut runs = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
        waitid(WaitId::Pid(Pid::from_child(&ended)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
        drop(tell);
        wait.recv().ok();
        drop(runs.stdin.take());
        Ok([ended.wait()?.code(), runs.wait()?.code()])
    });
    ready.recv().ok();
    let scope = containment.new_scope();
    let bench = bench(&scope);
    let leaves = ["sh", "-c", "for i in 1 2 3; do setsid sleep 600 >/dev/null 2>&1 & done"];
    let running = start(&bench, &scope, &leaves).await.map_err(|error| error.to_string())?;
    running.finish(BOUNDS, &bench.context).await.map_err(|error| error.to_string())?;
    same("empty", scope.clean_up().await, Cleanup::Complete)?;
    drop(go);
    let seen = handler.join().map_err(|_| "the handler panicked".to_owned())?.map_err(|error| error.to_string())?;
    same("how they ended", seen, [Some(7), Some(0)])
}

const LOOK: &str = "echo $0 \"$@\"; pwd; tr '\\0' '\\n' </proc/$$/environ | cut -d= -f1 | sort | tr '\\n' ' '; echo; \
                    tr '\\0' ' ' </proc/$$/cmdline; echo; echo /proc/$$/fd/*; grep -E '^Sig(Blk|Ign)' /proc/self/status; \
                    echo err >&2; readlink /proc/$$/fd/1 | cut -d: -f1; [ /proc/$$/fd/1 -ef /proc/$$/fd/2 ] && echo one";

async fn environment_of_a_payload(containment: &Containment) -> Result<(), String> {
    let argv = ["sh", "-c", LOOK, "zero", "one two", ""];
    let [bare, here] = both_ways(containment, &argv, |_| Vec::new()).await?;
    if bare.0 != ProcessStatus::Code(0) || !bare.1.contains("/proc/PID/fd/3") || !bare.1.contains("ODD-name") {
        return Err(format!("{bare:?}"));
    }
    same("what it finds", here, bare)
}

/// The end and the output of a payload, as a plain process and in a scope.
async fn both_ways(
    containment: &Containment,
    argv: &[&str],
    variables: impl Fn(&Bench) -> Vec<(&'static str, String)>,
) -> Result<[(ProcessStatus, String); 2], String> {
    let mut seen = Vec::new();
    for scope in [ProcessScope::without_cookie(), containment.new_scope()] {
        let bench = bench(&scope);
        let variables = variables(&bench);
        let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let channel = pipe().map_err(|error| error.to_string())?.1;
        let running = start_with(&bench, &scope, argv, &variables, channel).await.map_err(|error| error.to_string())?;
        let leader = format!("/proc/{}/", running.group());
        let ended = running.finish(BOUNDS, &bench.context).await.map_err(|error| error.to_string())?;
        same("empty", scope.clean_up().await, Cleanup::Complete)?;
        let folder = bench.workdir().display().to_string();
        let log = bench.log().replace(&folder, "FOLDER").replace(&leader, "/proc/PID/");
        seen.push((ended.status, log.replace("JOURNEYMAN_CLAIM_COOKIE ", "")));
    }
    seen.try_into().map_err(|_| "two ways".to_owned())
}

async fn a_missing_preload_is_a_warning(containment: &Containment) -> Result<(), String> {
    let preload = |_: &Bench| vec![("LD_PRELOAD", "/no/such.so".to_owned())];
    let [bare, here] = both_ways(containment, &["sh", "-c", "echo it ran"], preload).await?;
    if here.0 != ProcessStatus::Code(0) || !here.1.contains("it ran") || !here.1.contains("/no/such.so") {
        return Err(format!("{here:?}"));
    }
    same("what is seen", here, bare)
}

async fn the_loaders_variables(containment: &Containment) -> Result<(), String> {
    let broken = |bench: &Bench| {
        let folder = bench.workdir().join("lib");
        std::fs::create_dir(&folder).unwrap();
        for library in ["libc.so.6", "libgcc_s.so.1"] {
            std::fs::write(folder.join(library), "x".repeat(4096)).unwrap();
        }
        vec![("LD_LIBRARY_PATH", folder.display().to_string())]
    };
    let [bare, here] = both_ways(containment, &["sh", "-c", "echo it ran"], broken).await?;
    if here.0 != ProcessStatus::Code(127) || !here.1.contains("FOLDER/lib/libc.so.6") {
        return Err(format!("{here:?}"));
    }
    same("the payload's own failure", here, bare)?;
    let odd = |_: &Bench| {
        let text = [("LD_LIBRARY_PATH", "/no/folder"), ("LD_BIND_NOW", "1"), ("LD_PROFILE", ""), ("EMPTY", "")];
        let text = text.into_iter().chain([("GLIBC_TUNABLES", "glibc.malloc.check=0"), ("LINES_", "a=b\nc")]);
        let long = std::iter::once(("LONG", "long ".repeat(20_000)));
        text.map(|(name, value)| (name, value.to_owned())).chain(long).collect()
    };
    let look = "tr '\\0' '\\n' </proc/$$/environ | grep -v -e JOURNEYMAN_CLAIM_COOKIE= | sort";
    let [bare, here] = both_ways(containment, &["sh", "-c", look], odd).await?;
    if !here.1.contains("LD_PROFILE=\n") || !here.1.contains("long long") {
        return Err(here.1);
    }
    same("the environment", here, bare)
}

async fn errors_are_the_same(containment: &Containment) -> Result<(), String> {
    for (file, content) in [("interpreter", "#!/no/such/interpreter\n"), ("here", "")] {
        let mut errors = Vec::new();
        for scope in [ProcessScope::without_cookie(), containment.new_scope()] {
            let bench = bench(&scope);
            let path = bench.workdir().join(file);
            std::fs::write(&path, content).unwrap();
            let mode = if content.is_empty() { 0o644 } else { 0o755 };
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
            let error = match start(&bench, &scope, &[&format!("./{file}")]).await {
                Ok(running) => return Err(format!("{file} was started: {running:?}")),
                Err(error) => error,
            };
            same("empty", scope.clean_up().await, Cleanup::Complete)?;
            errors.push((error.kind(), error.raw_os_error(), error.to_string()));
        }
        same(file, &errors[1], &errors[0])?;
    }
    Ok(())
}

async fn two_processes(containment: &Containment) -> Result<(), String> {
    let scope = containment.new_scope();
    let bench = bench(&scope);
    let lasting = start(&bench, &scope, &["sh", "-c", "while [ ! -e go ]; do :; done; exit 7"]).await.unwrap();
    let short = start(&bench, &scope, &["true"]).await.unwrap();
    let ended = short.finish(BOUNDS, &bench.context).await.unwrap();
    same("the short one", ended.status, ProcessStatus::Code(0))?;
    std::fs::write(bench.workdir().join("go"), "").unwrap();
    let ended = lasting.finish(BOUNDS, &bench.context).await.unwrap();
    same("the lasting one", ended.status, ProcessStatus::Code(7))?;
    same("empty", scope.clean_up().await, Cleanup::Complete)
}

async fn dropped(containment: &Containment) -> Result<(), String> {
    let scope = containment.new_scope();
    let bench = bench(&scope);
    let alive = bench.alive();
    let script = "exec 9>alive; setsid sleep 7654321 & sleep 7654321 & echo ready; wait";
    let running = start(&bench, &scope, &["sh", "-c", script]).await.unwrap();
    tokio::select! {
        ended = running.finish(BOUNDS, &bench.context) => return Err(format!("{ended:?}")),
        () = bench.logged("ready") => {}
    }
    same("empty", scope.clean_up().await, Cleanup::Complete)?;
    alive.gone().await;
    Ok(())
}

/// Two claims run, and one leaves a daemon without an environment, which may belong to either.
async fn ambiguous_orphan() -> Result<(), String> {
    let containment = at(ContainmentLevel::ProcessGroup, "ambiguous")?;
    let (first, second) = (containment.new_scope(), containment.new_scope());
    let (one, other) = (bench(&first), bench(&second));
    let alive = one.alive();
    let lasting = start(&other, &second, &["sh", "-c", "while [ ! -e go ]; do sleep 0.01; done"]).await.unwrap();
    let script = "( env -i setsid sh -c 'exec 9>alive; echo >up; exec sleep 7654321' >/dev/null 2>&1 3>&- & ); \
                  while [ ! -e up ]; do :; done";
    let left = start(&one, &first, &["sh", "-c", script]).await.unwrap();
    let ended = left.finish(BOUNDS, &one.context).await.unwrap();
    same("the first", ended.status, ProcessStatus::Code(0))?;
    same("the cleanup of the first", first.clean_up().await, Cleanup::Incomplete)?;
    // After the other claim's end both have ended, so the daemon is killed.
    std::fs::write(other.workdir().join("go"), "").unwrap();
    let ended = lasting.finish(BOUNDS, &other.context).await.unwrap();
    same("the second", ended.status, ProcessStatus::Code(0))?;
    same("the cleanup of the second", second.clean_up().await, Cleanup::Complete)?;
    first.wait_cleaned_up().await;
    alive.gone().await;
    Ok(())
}

/// The same with control groups, where the daemon has left its group. A process in another claim's group belongs to that claim.
async fn escaped_process(containment: &Containment) -> Result<(), String> {
    let (first, second) = (containment.new_scope(), containment.new_scope());
    let (one, other) = (bench(&first), bench(&second));
    let (alive, neighbour) = (one.alive(), other.alive());
    let script = "( env -i setsid sh -c 'exec 9>alive; echo >up; exec sleep 7654321' >/dev/null 2>&1 3>&- & ); \
                  while [ ! -e go ]; do sleep 0.01; done";
    let lasting = start(&other, &second, &["sh", "-c", script]).await.unwrap();
    let script = format!(
        "{LEAVE}( leave; exec env -i setsid sh -c 'exec 9>alive; echo >up; exec sleep 7654321' >/dev/null 2>&1 3>&- ) & \
         while [ ! -e up ] || [ ! -e {}/up ]; do :; done",
        other.workdir().display()
    );
    let left = start(&one, &first, &["sh", "-c", &script]).await.unwrap();
    let ended = left.finish(BOUNDS, &one.context).await.unwrap();
    same("the first", ended.status, ProcessStatus::Code(0))?;
    let out = one.workdir().join("left").exists();
    let emptiness = if out { Cleanup::Incomplete } else { Cleanup::Complete };
    same("the cleanup of the first", first.clean_up().await, emptiness)?;
    same("its daemon runs if it escaped", alive.is_there(), out)?;
    same("the daemon of the second runs", neighbour.is_there(), true)?;
    std::fs::write(other.workdir().join("go"), "").unwrap();
    let ended = lasting.finish(BOUNDS, &other.context).await.unwrap();
    same("the second", ended.status, ProcessStatus::Code(0))?;
    same("the cleanup of the second", second.clean_up().await, Cleanup::Complete)?;
    // Both claims have ended.
    first.wait_cleaned_up().await;
    alive.gone().await;
    neighbour.gone().await;
    Ok(())
}

/// The controllers' limits, if they are delegated to this process.
async fn limits(report: &mut Report) {
    let limits = ResourceLimits { memory: Some(32 << 20), processes: Some(20), disk: None };
    let wanted = ContainmentConfig { limits, ..ContainmentConfig::default() };
    let containment = match Containment::probe(&format!("limits-{}", std::process::id()), wanted) {
        Ok(containment) if containment.limits() == limits => containment,
        Ok(containment) => {
            report.missing.push(format!("controllers: {}", containment.shortcomings().join("; ")));
            return;
        }
        Err(error) => return report.check("limits", Err(error.to_string())),
    };
    report.check(
        "a payload without memory is named as such",
        exceeds_limit(&containment, "tail /dev/zero", "out of memory").await,
    );
    let bomb = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do sleep 5 & done; wait";
    report.check(
        "a payload without processes is named as such",
        exceeds_limit(&containment, bomb, "could not start a process").await,
    );
}

async fn exceeds_limit(containment: &Containment, script: &str, words: &str) -> Result<(), String> {
    let scope = containment.new_scope();
    let bench = bench(&scope);
    let running = start(&bench, &scope, &["sh", "-c", script]).await.map_err(|error| error.to_string())?;
    let ended = running.finish(BOUNDS, &bench.context).await.map_err(|error| error.to_string())?;
    if ended.describe().contains(words) { Ok(()) } else { Err(format!("{ended:?}")) }
}
