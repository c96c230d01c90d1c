//! Payload processes in their enclosures: what one costs while it runs, how fast many end, and what a start takes.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use journeyman::domain::id::{Run, TaskId};
use journeyman::domain::outcome::Cleanup;
use journeyman::domain::time::Instant;
use journeyman::handler::artifact::Artifacts;
use journeyman::handler::environment::Variables;
use journeyman::handler::log::{LogLimits, TaskLog};
use journeyman::handler::process::{Input, Launch, RunLimits, RunningProcess};
use journeyman::handler::{CancelCause, Cancellation, Context, TaskInfo};
use journeyman::host::clock::Clock;
use journeyman::host::containment::{Containment, ContainmentConfig, ProcessScope};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Done;
use crate::limits::Spans;
use crate::roles::now;
use crate::table::{Row, load};

const BOUNDS: RunLimits = RunLimits { run_time: None, termination_grace: Duration::ZERO };

/// Each process tree has a leader, a child, and a child that has left the group.
const TREE: &str = "sleep 600 & setsid sleep 600 & echo ready; wait";

/// As many processes, all of them in the group.
const PLAIN_TREE: &str = "sleep 600 & sleep 600 & echo ready; wait";

struct Orders {
    cancel: watch::Sender<Option<Cancellation>>,
    lease: watch::Sender<Instant>,
}

fn context(folder: &Path, number: usize, orders: &Orders, within: &ProcessScope) -> Done<Context> {
    let run = Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").ok_or("a task id")?, run: u32::try_from(number)? };
    let task =
        TaskInfo { run, source: "bench".to_owned(), definition: serde_json::Value::Null, env: Default::default() };
    let log = TaskLog::new(folder.join(format!("{number}.log")), LogLimits::default());
    let (cancel, lease) = (orders.cancel.subscribe(), orders.lease.subscribe());
    let folder = folder.to_owned();
    Ok(Context::new(task, folder, log, Artifacts::new(), cancel, lease, Clock::boot()).in_scope(within.clone()))
}

async fn start(argv: &[&str], context: &Context) -> Done<RunningProcess> {
    let argv: Vec<String> = argv.iter().map(|&argument| argument.to_owned()).collect();
    let env = Variables::new();
    let within = context.scope();
    let workdir = context.workdir();
    Ok(RunningProcess::start(Launch {
        argv: &argv,
        env: &env,
        workdir,
        input: Input::Null,
        message_channel: None,
        scope: within,
    })
    .await?)
}

fn descriptors() -> Done<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// Memory of this process that no file stands behind.
fn anonymous_kib() -> Done<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
    Ok(line.trim_end_matches("kB").trim().parse()?)
}

/// What is measured in a process of its own, which has no memory yet that it could use again.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum Part {
    Trees { count: usize },
    Starts { count: usize },
}

/// Measures it there.
pub(crate) async fn alone(part: Part, folder: &Path) -> Done<Vec<Row>> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(ALONE).arg(serde_json::to_string(&part)?).arg(folder).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.stderr(Stdio::inherit()).output().await?;
    if !output.status.success() {
        return Err(format!("it ended with {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// What a process is told that does nothing but measure one part.
pub(crate) const ALONE: &str = "--alone";

/// Measures it here.
pub(crate) async fn here(part: Part, folder: &Path) -> Done<Vec<Row>> {
    match part {
        Part::Trees { count } => trees(folder, count).await,
        Part::Starts { count } => starts(folder, count).await,
    }
}

/// Many process trees that run at once and are told to end at once.
async fn trees(folder: &Path, count: usize) -> Done<Vec<Row>> {
    let containment = Containment::probe("bench", ContainmentConfig::default())?;
    let load = load();
    let orders = Orders { cancel: watch::Sender::new(None), lease: watch::Sender::new(Instant::ORIGIN) };
    let (memory, files) = (anonymous_kib()?, descriptors()?);
    let mut running = JoinSet::new();
    let (ready, mut readies) = tokio::sync::mpsc::channel(count);
    for number in 0..count {
        let enclosure = containment.new_scope();
        let context = context(folder, number, &orders, &enclosure)?;
        let process = start(&["sh", "-c", TREE], &context).await?;
        let ready = ready.clone();
        running.spawn(async move {
            let said = async {
                context.log().wait_for_growth(0).await;
                ready.send(()).await.ok();
                std::future::pending::<()>().await;
            };
            let ended = tokio::select! {
                ended = process.finish(BOUNDS, &context) => ended,
                () = said => unreachable!("it waits"),
            };
            (ended, enclosure.clean_up().await)
        });
    }
    for _ in 0..count {
        readies.recv().await.ok_or("a tree did not start")?;
    }
    let kib = anonymous_kib()?.saturating_sub(memory) as f64 / count as f64;
    let files = (descriptors()? - files) as f64 / count as f64;
    let began = now();
    let clock = Clock::boot();
    let order = Cancellation { cause: CancelCause::Shutdown, deadline: clock.now(), termination_grace: Duration::ZERO };
    orders.cancel.send_replace(Some(order));
    while let Some(one) = running.join_next().await {
        let (ended, emptiness) = one?;
        if emptiness != Cleanup::Complete || !ended?.survivors.is_empty() {
            return Err("a process tree is not gone".into());
        }
    }
    let took = now() - began;
    let plain = plain_trees(count).await?;
    Ok(vec![
        Row {
            what: format!("{count} process trees killed and proven gone ({})", containment.level()),
            reached: format!("{:.0} ms", took.as_secs_f64() * 1e3),
            aim: "≤ 100 ms".to_owned(),
            limit: format!(
                "{:.0} ms for {} processes by their groups' numbers alone",
                plain.as_secs_f64() * 1e3,
                count * 3
            ),
            load,
        },
        Row {
            what: format!("… the worker's own memory and descriptors for each, of {count}"),
            reached: format!("{kib:.1} KiB, {files:.1}"),
            aim: "≤ 24 KiB, ≤ 4".to_owned(),
            limit: String::new(),
            load,
        },
    ])
}

/// The same with nothing around the trees: each is killed by the number of its group, and is gone when nobody holds its output.
async fn plain_trees(count: usize) -> Done<Duration> {
    let (mut trees, mut groups) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let mut command = Command::new("sh");
        command.args(["-c", PLAIN_TREE]).process_group(0).kill_on_drop(true);
        let mut tree = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        groups.push(tree.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or("it has ended")?);
        let mut said = tree.stdout.take().ok_or("it has an output")?;
        said.read_exact(&mut [0; "ready\n".len()]).await?;
        trees.push((tree, said));
    }
    let began = now();
    for group in groups {
        kill_process_group(group, Signal::KILL)?;
    }
    for (mut tree, mut said) in trees {
        said.read_to_end(&mut Vec::new()).await?;
        tree.wait().await?;
    }
    Ok(now() - began)
}

/// What it takes from asking for a process to its proven end, in an enclosure and without.
async fn starts(folder: &Path, count: usize) -> Done<Vec<Row>> {
    let containment = Containment::probe("bench", ContainmentConfig::default())?;
    let load = load();
    let orders = Arc::new(Orders { cancel: watch::Sender::new(None), lease: watch::Sender::new(Instant::ORIGIN) });
    let spans = async |rest: Duration, count: usize, contained: Contained| -> Done<Spans> {
        let mut spans = Vec::new();
        for number in 0..count {
            sleep(rest).await;
            let enclosure = match contained {
                Contained::Yes => containment.new_scope(),
                Contained::No => ProcessScope::without_cookie(),
            };
            let context = context(folder, number, &orders, &enclosure)?;
            let began = now();
            start(&["/bin/true"], &context).await?.finish(BOUNDS, &context).await?;
            enclosure.clean_up().await;
            spans.push(now() - began);
        }
        Ok(Spans::new(spans))
    };
    let mut rows = Vec::new();
    for (what, rest, count) in [
        ("one after the other", Duration::ZERO, count),
        ("after 100 ms of rest", Duration::from_millis(100), count / 8),
    ] {
        let (with, without) = (spans(rest, count, Contained::Yes).await?, spans(rest, count, Contained::No).await?);
        let millis = |spans: &Spans| format!("{:.2} ms", spans.percentile(50).as_secs_f64() * 1e3);
        rows.push(Row {
            what: format!("/bin/true from start to proven end, {what} ({}): p50 of {count}", containment.level()),
            reached: millis(&with),
            aim: String::new(),
            limit: format!("{} without containment", millis(&without)),
            load,
        });
    }
    Ok(rows)
}

#[derive(Clone, Copy)]
enum Contained {
    Yes,
    No,
}
