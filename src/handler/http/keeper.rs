//! Keeps a service there: asks after it, and, where the worker starts it, starts it, ends it and starts it again, as
//! [`crate::domain::service`] has it.

use std::future::Future;
use std::os::unix::fs::FileTypeExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use url::Url;

use super::{Inner, Service, Target, Up};
use crate::domain::outcome::Emptiness;
use crate::domain::service::{Effect, Event, Health, Keeping, Policy, Service as Rules, Serving, Why};
use crate::handler::Beside;
use crate::handler::beside::{One, Word};
use crate::handler::environment::Variables;
use crate::handler::process::{Bounds, Input, Launch, Running};
use crate::host::program::PATH_DEFAULT;
use crate::limits::{
    SERVICE_ASK_ABSENT, SERVICE_ASK_STARTING, SERVICE_FAILURES_SAID, SERVICE_FAILURES_SAID_EVERY, SERVICE_MISSES_MAX,
    SERVICE_STAYS,
};

type Waiting<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// One life of the program.
struct Life {
    one: One,
    /// How it ended.
    end: Waiting<String>,
}

/// What is waited for.
enum Next {
    Over,
    Ended(String),
    Happened(Event),
}

/// Keeps it there until the worker goes.
pub(super) async fn keep(http: Arc<Inner>, beside: Beside) {
    let settings = &http.settings;
    let (keeping, ask_starting) = match settings.service {
        Some(_) => (Keeping::Here, SERVICE_ASK_STARTING),
        None => (Keeping::Elsewhere, SERVICE_ASK_ABSENT),
    };
    let policy = Policy {
        keeping,
        start_within: settings.start_within,
        ask_starting,
        ask_well: settings.health_every,
        misses_max: SERVICE_MISSES_MAX,
    };
    let rules = Rules::new(policy, uuid::Uuid::new_v4().as_u64_pair().0, beside.clock().now());
    let log = settings.service.as_ref().map(|_| beside.log(&settings.name));
    let word = Word { log, ..Word::default() };
    Keeper { http, beside, rules, word, life: None, asking: None, epoch: 0, starts: 0, cause: None }.keep().await;
}

struct Keeper {
    http: Arc<Inner>,
    beside: Beside,
    rules: Rules,
    word: Word,
    life: Option<Life>,
    asking: Option<Waiting<Health>>,
    /// How often it came up.
    epoch: u64,
    starts: u64,
    /// Why it was told to end, if it was.
    cause: Option<Why>,
}

impl Keeper {
    async fn keep(mut self) {
        if self.http.settings.service.is_none() {
            self.say(Serving::Down, format!("it is not started here, and does not answer at {}", self.http.place()));
        }
        self.happened(Event::Tick);
        loop {
            while let Some(effect) = self.rules.next_effect() {
                self.carry_out(effect).await;
            }
            match self.next().await {
                Next::Over => return self.end().await,
                Next::Ended(how) => self.ended(&how).await,
                Next::Happened(event) => {
                    if let Event::Answered(_) = event {
                        self.asking = None;
                    }
                    self.happened(event);
                }
            }
        }
    }

    fn happened(&mut self, event: Event) {
        self.rules.handle(event, self.beside.clock().now());
    }

    async fn next(&mut self) -> Next {
        let Self { life, asking, beside, http, rules, .. } = self;
        let (due, clock) = (rules.next_deadline(), beside.clock());
        let ended = async {
            match life {
                Some(life) => life.end.as_mut().await,
                None => std::future::pending().await,
            }
        };
        let answered = async {
            match asking {
                Some(question) => question.as_mut().await,
                None => std::future::pending().await,
            }
        };
        let time = async {
            match due {
                Some(at) => clock.sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = beside.over() => Next::Over,
            how = ended => Next::Ended(how),
            health = answered => Next::Happened(Event::Answered(health)),
            () = http.refused.notified() => Next::Happened(Event::Unreachable),
            () = http.doubted.notified() => Next::Happened(Event::BrokeOff),
            () = time => Next::Happened(Event::Tick),
        }
    }

    async fn carry_out(&mut self, effect: Effect) {
        let http = Arc::clone(&self.http);
        let (name, place) = (&http.settings.name, http.place());
        match effect {
            Effect::Start => {
                let event = match self.start().await {
                    Ok(()) => Event::Started,
                    Err(error) => {
                        tracing::error!(handler = name, %error, "a service cannot be started");
                        self.happened(Event::NotStarted);
                        return self.say_failed(&format!("it cannot be started: {error}"));
                    }
                };
                self.happened(event);
            }
            Effect::Ask => self.asking = Some(Box::pin(ask(Arc::clone(&self.http)))),
            Effect::End(why) => {
                tracing::error!(handler = name, "a service {}: it is ended, and started again", said(why));
                self.cause = Some(why);
                self.asking = None;
                if let (Some(life), Some(service)) = (&self.life, &http.settings.service) {
                    life.one.end(service.grace, self.beside.clock());
                }
            }
            Effect::Up => {
                tracing::info!(handler = name, at = place, "a service is up");
                self.epoch += 1;
                http.up.send_replace(Up::Yes { epoch: self.epoch });
                self.say(Serving::Up, format!("it answers at {place}"));
            }
            Effect::Down => {
                tracing::warn!(
                    handler = name,
                    at = place,
                    "a service is not there any more; nothing is claimed for it"
                );
                http.up.send_replace(Up::No);
                self.say(Serving::Down, format!("it does not answer at {place}"));
            }
        }
    }

    async fn start(&mut self) -> std::io::Result<()> {
        let http = Arc::clone(&self.http);
        let Some(service) = &http.settings.service else { return Ok(()) };
        let name = &http.settings.name;
        // What an earlier life has left would be in the way of most programs.
        if let Target::Unix(socket) = &http.settings.target
            && socket.symlink_metadata().is_ok_and(|about| about.file_type().is_socket())
        {
            std::fs::remove_file(socket)?;
        }
        let one = self.beside.one(name)?;
        let env = environment(&http, service, &one);
        let launch = Launch {
            argv: &service.exec,
            env: &env,
            workdir: one.folder(),
            input: Input::Null,
            channel: None,
            within: one.context.enclosure(),
        };
        let running = tokio::select! {
            biased;
            () = self.beside.over() => return Ok(()),
            running = Running::start(launch) => running?,
        };
        tracing::info!(handler = name, group = running.group(), log = %one.context.log().path().display(), "a service is started");
        let (context, bounds) = (one.context.clone(), Bounds { run_time: None, grace: service.grace });
        let end = Box::pin(async move {
            match running.finish(bounds, &context).await {
                Ok(ended) => ended.said(),
                Err(error) => error.to_string(),
            }
        });
        self.life = Some(Life { one, end });
        self.cause = None;
        self.word.restarts = self.starts;
        self.starts += 1;
        if self.rules.failures() == 0 {
            self.say(Serving::Down, "it was started, and does not answer yet".to_owned());
        }
        Ok(())
    }

    /// A life of it is over.
    async fn ended(&mut self, how: &str) {
        let Some(life) = self.life.take() else { return };
        self.asking = None;
        clear(&self.http.settings.name, &life.one).await;
        let why = match self.cause.take() {
            Some(why) => format!("it {} and was ended", said(why)),
            None => format!("it ended ({how})"),
        };
        tracing::error!(handler = self.http.settings.name, "a service: {why}");
        self.happened(Event::Ended);
        // Said at once: nothing of it is there.
        self.http.up.send_replace(Up::No);
        self.say_failed(&why);
    }

    /// Says why it is not there, and tells the operator where that goes on.
    fn say_failed(&mut self, why: &str) {
        let failures = self.rules.failures();
        let log = self.word.log.as_ref().map(|log| log.display().to_string()).unwrap_or_default();
        let what = match failures {
            0 | 1 => format!("{why}; it is started again, and {log}.before is the log of that"),
            many => format!(
                "{why}, and did not last {many} times in a row; it is started again, later each time, and its logs are {log} \
                 and {log}.before"
            ),
        };
        if failures == SERVICE_FAILURES_SAID || (failures > 0 && failures.is_multiple_of(SERVICE_FAILURES_SAID_EVERY)) {
            tracing::error!(
                alert = "service",
                handler = self.http.settings.name,
                failures,
                "[alert operator] a service does not last: {why}; nothing is claimed for it, and its log is {log}"
            );
        }
        self.say(Serving::Down, what);
    }

    fn say(&mut self, serving: Serving, what: String) {
        (self.word.serving, self.word.what) = (serving, what);
        self.beside.say(self.word.clone());
    }

    /// The worker goes.
    async fn end(mut self) {
        self.http.up.send_replace(Up::No);
        self.asking = None;
        let Some(Life { one, end }) = self.life.take() else { return };
        if let Some(service) = &self.http.settings.service {
            one.end(service.grace, self.beside.clock());
        }
        let how = end.await;
        clear(&self.http.settings.name, &one).await;
        tracing::info!(handler = self.http.settings.name, how, "a service has ended with its worker");
    }
}

/// Ends what a life has left, and puts its log together.
async fn clear(name: &str, one: &One) {
    match one.context.enclosure().clear().await {
        Emptiness::Proven => one.over(),
        Emptiness::Unproven => {
            tracing::error!(
                handler = name,
                "[alert operator] processes of a service may still be there; the next one is started all the same"
            );
        }
    }
    let log = one.context.log().clone();
    if let Ok(Err(error)) = tokio::task::spawn_blocking(move || log.finish()).await {
        tracing::warn!(handler = name, %error, "the log of a service is not whole");
    }
}

/// What it finds in its environment, each line over the one before.
fn environment(http: &Inner, service: &Service, one: &One) -> Variables {
    let mut env = Variables::new();
    let mut set = |name: &str, value: String| env.insert(name.to_owned(), value);
    set("PATH", PATH_DEFAULT.to_owned());
    set("HOME", one.folder().to_string_lossy().into_owned());
    for (name, value) in &service.env {
        set(name, value.clone());
    }
    set("JOURNEYMAN_HANDLER", http.settings.name.clone());
    match &http.settings.target {
        Target::Tcp(url) => set("JOURNEYMAN_SERVICE_URL", url.to_string()),
        Target::Unix(socket) => set("JOURNEYMAN_SERVICE_SOCKET", socket.to_string_lossy().into_owned()),
    };
    env
}

/// Asks whether it is well.
async fn ask(http: Arc<Inner>) -> Health {
    look(&http).await
}

/// Whether it answers after it has broken off. A process that is being ended may take connections still; it does not keep them.
pub(super) async fn stays(http: &Inner) -> bool {
    if http.settings.health.is_some() {
        return look(http).await != Health::Ill;
    }
    let mut byte = [0];
    let closed = async {
        match &http.settings.target {
            Target::Unix(socket) => {
                if let Ok(mut open) = UnixStream::connect(socket).await {
                    drop(open.read(&mut byte).await);
                }
            }
            Target::Tcp(url) => {
                if let Some(mut open) = tcp(url).await {
                    drop(open.read(&mut byte).await);
                }
            }
        }
    };
    timeout(SERVICE_STAYS, closed).await.is_err()
}

async fn look(http: &Inner) -> Health {
    let well = match &http.settings.health {
        Some(path) => {
            let Some(url) = http.address(path) else { return Health::Ill };
            match http.client.get(url).timeout(http.settings.health_timeout).send().await {
                Ok(response) => response.status().is_success(),
                // One that takes one request at a time is busy with it.
                Err(error) if error.is_timeout() && !error.is_connect() && http.at_work.load(Ordering::Relaxed) > 0 => {
                    return Health::Busy;
                }
                Err(_) => false,
            }
        }
        None => timeout(http.settings.health_timeout, connects(http)).await.unwrap_or_default(),
    };
    if well { Health::Well } else { Health::Ill }
}

async fn connects(http: &Inner) -> bool {
    match &http.settings.target {
        Target::Unix(socket) => UnixStream::connect(socket).await.is_ok(),
        Target::Tcp(url) => tcp(url).await.is_some(),
    }
}

async fn tcp(url: &Url) -> Option<TcpStream> {
    let (host, port) = (url.host_str()?, url.port_or_known_default()?);
    TcpStream::connect((host.trim_matches(['[', ']']), port)).await.ok()
}

const fn said(why: Why) -> &'static str {
    match why {
        Why::NeverWell => "was not well within `start_within`",
        Why::NoLongerWell => "was no longer well",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::UnixListener;

    use super::super::{Http, Settings};
    use super::*;

    #[tokio::test]
    async fn who_takes_a_connection_and_drops_it_is_not_there() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("service.sock");
        let settings = Settings {
            name: "service".to_owned(),
            target: Target::Unix(socket.clone()),
            health: None,
            health_every: Duration::from_secs(1),
            health_timeout: Duration::from_secs(1),
            start_within: Duration::from_secs(1),
            max_run_time: Duration::from_secs(1),
            forward_headers: Vec::new(),
            service: None,
        };
        let http = Http::new(settings).unwrap();
        assert!(!stays(&http.inner).await, "nobody listens");
        let listener = UnixListener::bind(&socket).unwrap();
        assert!(stays(&http.inner).await);
        let dropping = async {
            // The first is the one that lasted.
            while let Ok((open, _)) = listener.accept().await {
                drop(open);
            }
        };
        // Where the machine stalls it is not dropped in time, and seems to stay.
        let gone = timeout(Duration::from_secs(60), async { while stays(&http.inner).await {} });
        let seen = tokio::select! {
            seen = gone => seen,
            () = dropping => unreachable!("it listens for ever"),
        };
        seen.expect("it is not there");
    }
}
