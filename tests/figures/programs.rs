//! The programs that are measured: `journeyman` with a configuration of its own, the embedded queue, a RabbitMQ, a ZooKeeper.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use futures_util::{TryStreamExt as _, stream};
use journeyman::control;
use journeyman::control::client::ControlClient;
use journeyman::source::taskcluster::Api;
use journeyman::task::formats::new_task_id;
use journeyman_domain::id::TaskId;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::{sleep, timeout};

use crate::machine::{Usage, now};
use crate::support::named;
use crate::support::server::Server;
use crate::support::task_queue::{CLIENT_ID, TOKEN, api, definition};
use crate::{Lab, Outcome};

/// The longest that anything may take before the run is given up.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);
/// The task queue of every measurement.
pub(crate) const QUEUE: &str = "bench/tasks";
/// How many calls are in flight at once.
const CALLS_MAX: usize = 64;

/// Repeats `check` until it is true, every few milliseconds.
pub(crate) async fn until<F: Future<Output = Outcome<bool>>>(what: &str, mut check: impl FnMut() -> F) -> Outcome<()> {
    let checking = async {
        while !check().await? {
            sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    };
    timeout(TIMEOUT, checking).await.map_err(|_| format!("{what} did not happen in {TIMEOUT:?}"))?
}

/// A `journeyman` command as a child process, killed on drop.
pub(crate) struct Program {
    pub(crate) child: Child,
    pub(crate) home: PathBuf,
}

impl Program {
    /// Waits until the control socket listens; its file exists a moment before.
    pub(crate) async fn control(&self) -> Outcome<ControlClient> {
        let socket = self.home.join("work/control.sock");
        let listens = async || match ControlClient::new(&socket) {
            Ok(_) => Ok(true),
            Err(control::client::Error::NotRunning(_)) => Ok(false),
            Err(error) => Err(error.into()),
        };
        until("the control socket", listens).await?;
        Ok(ControlClient::new(&socket)?)
    }

    pub(crate) fn start(lab: &Lab, command: &str, config: &str, env: &[(&str, &str)]) -> Outcome<Self> {
        let home = lab.fresh(command)?;
        let token = home.join("token");
        std::fs::write(&token, TOKEN)?;
        std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
        let file = home.join("journeyman.toml");
        std::fs::write(&file, config.replace("@HOME@", &home.display().to_string()))?;
        let child = Command::new(env!("CARGO_BIN_EXE_journeyman"))
            .args([command, "--config"])
            .arg(file)
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(home.join("log"))?)
            .kill_on_drop(true)
            .spawn()?;
        Ok(Self { child, home })
    }

    /// `journeyman worker` with one source for each task queue; `more` ends inside `[worker]`.
    pub(crate) fn worker(lab: &Lab, dialect: &str, root_url: &str, queues: &[String], more: &str) -> Outcome<Self> {
        let mut config = format!("{more}\nid = \"worker-{{pid}}\"\ngroup = \"bench\"\nwork_dir = \"@HOME@/work\"\n");
        for (number, queue) in queues.iter().enumerate() {
            config.push_str(&format!(
                "[source.q{number}]\nkind = \"taskcluster\"\ndialect = \"{dialect}\"\nroot_url = \"{root_url}\"\n\
                 task_queue = \"{queue}\"\nclient_id = \"{CLIENT_ID}\"\naccess_token_file = \"@HOME@/token\"\n"
            ));
        }
        Self::start(lab, "worker", &config, &[])
    }

    pub(crate) fn usage(&self) -> Outcome<Usage> {
        Usage::of(self.child.id().ok_or("the process has exited by itself")?)
    }

    /// The first line of its log that contains `text`.
    pub(crate) async fn logged(&self, text: &str) -> Outcome<String> {
        let log = self.home.join("log");
        let find =
            || std::fs::read_to_string(&log).map(|log| log.lines().find(|line| line.contains(text)).map(str::to_owned));
        until(&format!("a log line with {text:?}"), async || Ok(find()?.is_some())).await?;
        Ok(find()?.unwrap_or_default())
    }

    pub(crate) async fn exit_code(&mut self) -> Outcome<Option<i32>> {
        Ok(timeout(TIMEOUT, self.child.wait()).await.map_err(|_| "a process did not exit")??.code())
    }
}

/// This program in another role: it prints lines and exits at the end of its standard input.
pub(crate) struct Role {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Role {
    pub(crate) fn start(lab: &Lab, flag: &str, role: &impl serde::Serialize) -> Outcome<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(flag)
            .arg(serde_json::to_string(role)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(lab.fresh("role")?.join("log"))?)
            .kill_on_drop(true)
            .spawn()?;
        let (stdin, stdout) = (child.stdin.take().ok_or("stdin")?, child.stdout.take().ok_or("stdout")?);
        Ok(Self { child, stdin, lines: BufReader::new(stdout).lines() })
    }

    /// The rest of the next line that begins with `word`.
    pub(crate) async fn line(&mut self, word: &str) -> Outcome<String> {
        let reading = async {
            while let Some(line) = self.lines.next_line().await? {
                if let Some(rest) = line.strip_prefix(word) {
                    return Ok(rest.trim().to_owned());
                }
            }
            Err(format!("a process exited before it printed {word:?}").into())
        };
        timeout(TIMEOUT, reading).await.map_err(|_| format!("no line {word:?} in {TIMEOUT:?}"))?
    }

    /// Elapsed time, CPU time and count of a `done` line.
    pub(crate) async fn done(&mut self) -> Outcome<(Duration, Duration, usize)> {
        let line = self.line("done").await?;
        let mut numbers = line.split(' ').map(str::parse);
        let mut next = || numbers.next().ok_or_else(|| format!("{line:?} is no result"));
        Ok((Duration::from_nanos(next()??), Duration::from_nanos(next()??), usize::try_from(next()??)?))
    }

    pub(crate) async fn counts(&mut self) -> Outcome<Value> {
        self.send("counts").await?;
        Ok(serde_json::from_str(&self.line("counts").await?)?)
    }

    pub(crate) async fn send(&mut self, word: &str) -> Outcome<()> {
        self.stdin.write_all(format!("{word}\n").as_bytes()).await?;
        Ok(self.stdin.flush().await?)
    }

    pub(crate) fn usage(&self) -> Outcome<Usage> {
        Usage::of(self.child.id().ok_or("the process has exited by itself")?)
    }

    pub(crate) async fn kill(mut self) -> Outcome<()> {
        Ok(self.child.kill().await?)
    }

    pub(crate) async fn stop(self) -> Outcome<()> {
        let Self { mut child, stdin, lines } = self;
        drop((stdin, lines));
        let status = timeout(TIMEOUT, child.wait()).await.map_err(|_| "a process did not exit")??;
        if status.success() { Ok(()) } else { Err(format!("a process exited with {status}").into()) }
    }
}

/// `journeyman queue` and a client of it.
pub(crate) struct Queue {
    pub(crate) program: Program,
    pub(crate) root_url: String,
    api: Api,
}

impl Queue {
    pub(crate) async fn start(lab: &Lab, claim_timeout: &str) -> Outcome<Self> {
        let config = format!(
            "[queue]\ndb = \"@HOME@/queue.db\"\nlisten = \"127.0.0.1:0\"\nclaim_timeout = \"{claim_timeout}\"\n\
             [queue.clients.{CLIENT_ID}]\naccess_token_file = \"@HOME@/token\"\nscopes = [\"*\"]\n"
        );
        let program = Program::start(lab, "queue", &config, &[])?;
        let line = program.logged("http://").await?;
        let url = line.split_once("http://").map(|(_, rest)| rest).unwrap_or_default();
        let address: String = url.chars().take_while(|c| c.is_ascii_digit() || ".:".contains(*c)).collect();
        let root_url = format!("http://{address}");
        Ok(Self { program, api: api(&root_url), root_url })
    }

    pub(crate) async fn create_one(&self, payload: &Value) -> Outcome<TaskId> {
        let task = new_task_id();
        self.api.create_task(&task, definition(QUEUE, payload)).await?;
        Ok(task)
    }

    /// Creates tasks in another queue than [`QUEUE`].
    pub(crate) async fn create_in(&self, queue: &str, count: usize) -> Outcome<()> {
        let ids: Vec<TaskId> = (0..count).map(|_| new_task_id()).collect();
        let payload = serde_json::json!({});
        self.for_each(&ids, async |api, task| Ok(api.create_task(task, definition(queue, &payload)).await.map(drop)?))
            .await
    }

    pub(crate) async fn create(&self, count: usize, payload: &Value) -> Outcome<Vec<TaskId>> {
        let ids: Vec<TaskId> = (0..count).map(|_| new_task_id()).collect();
        let create =
            async |api: &Api, task: &TaskId| Ok(api.create_task(task, definition(QUEUE, payload)).await.map(drop)?);
        self.for_each(&ids, create).await?;
        Ok(ids)
    }

    /// Fails unless each task was completed by exactly one run.
    pub(crate) async fn completed_once(&self, tasks: &[TaskId]) -> Outcome<()> {
        self.for_each(tasks, async |api, task| {
            let status = api.task_status(task).await?;
            let runs = status["runs"].as_array().map_or(0, Vec::len);
            let fine = runs == 1 && status["state"] == "completed";
            if fine { Ok(()) } else { Err(format!("{task} was not completed by exactly one run: {status}").into()) }
        })
        .await
    }

    pub(crate) async fn status(&self, task: &TaskId) -> Outcome<Value> {
        Ok(self.api.task_status(task).await?)
    }

    pub(crate) async fn cancel(&self, task: &TaskId) -> Outcome<()> {
        self.api.cancel_task(task).await?;
        Ok(())
    }

    /// How long the queue takes to answer a call.
    pub(crate) async fn round_trip(&self, task: &TaskId) -> Outcome<Duration> {
        let began = now();
        self.api.task_status(task).await?;
        Ok(now() - began)
    }

    async fn for_each(&self, tasks: &[TaskId], call: impl AsyncFn(&Api, &TaskId) -> Outcome<()>) -> Outcome<()> {
        let (api, call) = (&self.api, &call);
        stream::iter(tasks.iter().map(Ok)).try_for_each_concurrent(CALLS_MAX, |task| call(api, task)).await
    }
}

/// What a server says of itself, and the server if it is one of the run's own; or what the environment says of another.
/// `None` where there is none, which is printed.
fn server(lab: &Lab, script: &'static str, names: &[&str]) -> Outcome<Option<(Vec<String>, Option<Server>)>> {
    if let Some(values) = names.iter().map(|name| named(&format!("JOURNEYMAN_TEST_{name}"))).collect() {
        return Ok(Some((values, None)));
    }
    let mut own = Server::new(script, &lab.fresh(script)?);
    let why = match own.start() {
        Ok(()) => match names.iter().map(|name| own.value(name)).collect() {
            Some(values) => return Ok(Some((values, Some(own)))),
            None => "it does not say where it is".to_owned(),
        },
        Err(why) => why,
    };
    eprintln!("NOT MEASURED: no {script} (`apt-get install` provides it): {why}");
    Ok(None)
}

/// A RabbitMQ of the run's own, or the one that the environment names.
pub(crate) struct Broker {
    pub(crate) uri: String,
    /// The address of its management interface, with credentials.
    pub(crate) management: Option<String>,
    _own: Option<Server>,
}

impl Broker {
    pub(crate) fn start(lab: &Lab) -> Outcome<Option<Self>> {
        let Some((mut values, own)) = server(lab, "rabbitmq", &["AMQP"])? else { return Ok(None) };
        let management = match &own {
            Some(own) => own.value("MANAGEMENT"),
            None => named("JOURNEYMAN_TEST_AMQP_MANAGEMENT"),
        };
        Ok(values.pop().map(|uri| Self { uri, management, _own: own }))
    }
}

/// A PostgreSQL of the run's own, or the one that the environment names.
pub(crate) struct Postgres {
    url: String,
    pub(crate) ca: String,
    _own: Option<Server>,
}

impl Postgres {
    pub(crate) fn start(lab: &Lab) -> Outcome<Option<Self>> {
        let Some((values, own)) = server(lab, "postgres", &["POSTGRES", "POSTGRES_CA"])? else { return Ok(None) };
        let [url, ca] = <[String; 2]>::try_from(values).map_err(|values| format!("{values:?}"))?;
        Ok(Some(Self { url, ca, _own: own }))
    }

    /// The URL of a new database.
    pub(crate) async fn database(&self) -> Outcome<String> {
        let name = format!("bench_{}", new_task_id().as_str().replace(['-', '_'], "x").to_lowercase());
        let (client, connection) = tokio_postgres::connect(&self.url, tokio_postgres::NoTls).await?;
        let create = format!("CREATE DATABASE {name}");
        tokio::select! {
            created = client.batch_execute(&create) => created?,
            ended = connection => ended?,
        }
        let (base, _) = self.url.rsplit_once('/').ok_or("a URL without a database")?;
        Ok(format!("{base}/{name}"))
    }

    /// How many transactions of one row a second so many connections commit.
    pub(crate) async fn commits_per_second(&self, connections: usize, lasting: Duration) -> Outcome<f64> {
        let url = self.database().await?;
        let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
        tokio::select! {
            created = client.batch_execute("CREATE TABLE bare (id BIGSERIAL PRIMARY KEY, data TEXT)") => created?,
            ended = connection => ended?,
        }
        let began = now();
        let committing = (0..connections).map(|_| async {
            let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await?;
            let inserting = async {
                let insert = client.prepare("INSERT INTO bare (data) VALUES ($1)").await?;
                let mut count = 0_u32;
                while now() - began < lasting {
                    client.execute(&insert, &[&"a row of some bytes"]).await?;
                    count += 1;
                }
                Outcome::Ok(count)
            };
            tokio::select! {
                count = inserting => count,
                ended = connection => Err(format!("the connection has ended: {ended:?}").into()),
            }
        });
        let counts = futures_util::future::try_join_all(committing).await?;
        Ok(f64::from(counts.iter().sum::<u32>()) / (now() - began).as_secs_f64())
    }
}

/// A ZooKeeper of the run's own, or the one that the environment names.
pub(crate) struct Ensemble {
    pub(crate) servers: String,
    _own: Option<Server>,
}

impl Ensemble {
    pub(crate) fn start(lab: &Lab) -> Outcome<Option<Self>> {
        let Some((mut values, own)) = server(lab, "zookeeper", &["ZOOKEEPER"])? else { return Ok(None) };
        Ok(values.pop().map(|servers| Self { servers, _own: own }))
    }
}
