//! Many process trees that are killed at once.

use std::process::Stdio;
use std::time::Duration;

use crate::machine::{Row, now};
use crate::{Lab, Outcome};
use journeyman::handler::environment::Variables;
use journeyman::handler::log::{LogLimits, TaskLog};
use journeyman::handler::process::{Launch, ProcessStatus, RunLimits, RunningProcess};
use journeyman::handler::{CancelCause, Cancellation, Context, TaskInfo};
use journeyman_domain::id::{Run, TaskId};
use journeyman_domain::outcome::Cleanup;
use journeyman_platform::host::clock::Clock;
use journeyman_platform::host::containment::{Containment, ContainmentConfig};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// A leader, a child, and a child that has left the process group.
const TREE: &str = "sleep 600 & setsid sleep 600 & echo ready; wait";
/// Starts as many processes, all in the group.
const PLAIN_TREE: &str = "sleep 600 & sleep 600 & echo ready; wait";
const LIMITS: RunLimits = RunLimits { run_time: None, termination_grace: Duration::ZERO };

impl Lab {
    /// Process scopes beside process groups that are killed by number.
    pub(crate) async fn trees(&self) -> Outcome<Vec<Row>> {
        let count = self.pick(300, 20);
        let containment = Containment::probe("bench", ContainmentConfig::default())?;
        let (cancel, lease) = (watch::Sender::new(None), watch::Sender::new(None));
        let (memory, files) = (anonymous_kib()?, open_files()?);
        let (ready, mut ready_trees) = mpsc::channel(count);
        let mut running = JoinSet::new();
        for number in 0..count {
            let scope = containment.new_scope();
            let run =
                Run { task: TaskId::parse("fN1SbArXTPSVFNUvaOlinQ").ok_or("a task id")?, run: u32::try_from(number)? };
            let definition = Default::default();
            let task = TaskInfo {
                run,
                source: "bench".to_owned(),
                definition,
                env: Default::default(),
                trace: None,
                reported_runs: 0,
            };
            let log = TaskLog::new(self.path().join(format!("{number}.log")), LogLimits::default());
            let (cancel, lease) = (cancel.subscribe(), lease.subscribe());
            let folder = self.path().to_owned();
            let context = Context::new(task, folder, log, cancel, lease, Clock::boot());
            let context = context.in_scope(scope.clone());
            let argv = ["sh", "-c", TREE].map(str::to_owned);
            let env = Variables::new();
            let process = RunningProcess::start(Launch::new(&argv, &env, &context)).await?;
            let ready = ready.clone();
            running.spawn(async move {
                let report_ready = async {
                    context.log().wait_for_growth(0).await;
                    ready.send(()).await.ok();
                    std::future::pending::<()>().await;
                };
                let end = tokio::select! {
                    end = process.finish(LIMITS, &context) => end,
                    () = report_ready => unreachable!("it is pending"),
                };
                (end, scope.clean_up().await)
            });
        }
        for _ in 0..count {
            ready_trees.recv().await.ok_or("a tree did not start")?;
        }
        let kib = anonymous_kib()?.saturating_sub(memory) as f64 / count as f64;
        let files = (open_files()? - files) as f64 / count as f64;
        let began = now();
        let deadline = Clock::boot().now();
        let cancellation = Cancellation { cause: CancelCause::Shutdown, deadline, termination_grace: Duration::ZERO };
        cancel.send_replace(Some(cancellation));
        while let Some(ended) = running.join_next().await {
            let (end, cleanup) = ended?;
            if cleanup != Cleanup::Complete || end?.status == ProcessStatus::Stuck {
                return Err("a process tree is not gone".into());
            }
        }
        let took = now() - began;
        let plain = plain_trees(count).await?;
        let millis = |span: Duration| format!("{:.0} ms", span.as_secs_f64() * 1e3);
        Ok(vec![
            Row {
                figure: format!(
                    "{count} process trees killed, each shown to be gone ({})",
                    containment.level().as_str()
                ),
                reached: millis(took),
                aim: "≤ 100 ms",
                limit: format!("{} for {} processes by group number", millis(plain), count * 3),
            },
            Row {
                figure: format!("… the worker's own memory and descriptors for each of {count}"),
                reached: format!("{kib:.1} KiB, {files:.1}"),
                aim: "≤ 24 KiB, ≤ 4",
                limit: String::new(),
            },
        ])
    }
}

fn open_files() -> Outcome<usize> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count())
}

/// Memory of this process that is not backed by a file.
fn anonymous_kib() -> Outcome<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).ok_or("no RssAnon")?;
    Ok(line.trim_end_matches("kB").trim().parse()?)
}

/// Trees without a scope, killed by the number of their group; each is gone when its output is closed.
async fn plain_trees(count: usize) -> Outcome<Duration> {
    let (mut trees, mut groups) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for _ in 0..count {
        let mut command = Command::new("sh");
        command.args(["-c", PLAIN_TREE]).process_group(0).kill_on_drop(true);
        let mut tree = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        groups.push(tree.id().and_then(|id| Pid::from_raw(id.cast_signed())).ok_or("it has exited")?);
        let mut output = tree.stdout.take().ok_or("stdout")?;
        output.read_exact(&mut [0; "ready\n".len()]).await?;
        trees.push((tree, output));
    }
    let began = now();
    for group in groups {
        kill_process_group(group, Signal::KILL)?;
    }
    for (mut tree, mut output) in trees {
        output.read_to_end(&mut Vec::new()).await?;
        tree.wait().await?;
    }
    Ok(now() - began)
}
