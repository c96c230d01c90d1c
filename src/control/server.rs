//! The worker's end of the control socket.

use std::convert::Infallible;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWriteExt as _, DuplexStream, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{interval, timeout};
use tokio_util::io::ReaderStream;

pub use super::socket::Socket;
use super::{Answer, Order, Ordered, SPAN_MAX_SECONDS, Status};
use crate::domain::claim::{self, Obeyed};
use crate::handler::log::TaskLog;
use crate::limits::{
    CONTROL_ACCEPT_REST, CONTROL_BODY_BYTES_MAX, CONTROL_CONNECTIONS_MAX, CONTROL_FOLLOW_CHECK, CONTROL_HEAD_TIMEOUT,
    CONTROL_READ_BYTES, CONTROL_SOCKET_CHECK, CONTROL_TIMEOUT,
};
use crate::worker::view::Detail;
use crate::worker::{Command, Control, NotOne, Note, Shown, Told, view};

/// Reads the configuration again: what came of it, or why it was refused.
pub type Reload = dyn Fn() -> Reloaded + Send + Sync;
/// What came of reading the configuration again.
pub type Reloaded = Pin<Box<dyn Future<Output = Result<String, String>> + Send>>;

/// Who answers.
#[derive(Clone)]
pub struct Desk {
    /// The worker's id.
    pub id: String,
    /// Its group.
    pub group: String,
    /// The worker.
    pub control: Control,
    /// What `reload` does.
    pub reload: Arc<Reload>,
}

/// Answers until it is dropped; the socket's file goes with it.
pub async fn serve(socket: Socket, desk: Desk) -> Infallible {
    let reload = Arc::clone(&desk.reload);
    let (asks, asked) = mpsc::channel(CONTROL_CONNECTIONS_MAX);
    let desk = Counter { desk, reloads: asks };
    let router = Router::new()
        .route("/v1/status", get(status))
        .route("/v1/orders", post(order))
        .route("/v1/log", get(log))
        .route("/v1/task", get(show))
        .fallback(async || {
            let text = "a worker answers here; `journeyman status` and the like ask it";
            Refusal(StatusCode::NOT_FOUND, text.to_owned())
        })
        .with_state(desk);
    answer(socket, router, reload, asked).await
}

/// Answers with a router, and reloads where that asks for it.
pub(super) async fn answer(
    socket: Socket,
    router: Router,
    reload: Arc<Reload>,
    mut asked: mpsc::Receiver<Reloading>,
) -> Infallible {
    let Socket { mut listener, file } = socket;
    let file = Arc::new(file);
    let router = router.layer(DefaultBodyLimit::max(CONTROL_BODY_BYTES_MAX));
    let places = Arc::new(Semaphore::new(CONTROL_CONNECTIONS_MAX));
    let (mut connections, mut reloads) = (JoinSet::new(), JoinSet::new());
    let mut mending = JoinSet::new();
    let mut checks = interval(CONTROL_SOCKET_CHECK);
    loop {
        let (place, stream) = tokio::select! {
            accepted = next(&listener, &places) => accepted,
            _ = checks.tick(), if mending.is_empty() => {
                if file.is_missing() {
                    let file = Arc::clone(&file);
                    mending.spawn_blocking(move || file.mended());
                }
                continue;
            }
            Some(mended) = mending.join_next() => {
                match mended {
                    Ok(Ok(Some(again))) => listener = again,
                    Ok(Err(error)) => tracing::warn!("the control socket was removed and cannot be made again: {error}"),
                    Ok(Ok(None)) | Err(_) => {}
                }
                continue;
            }
            Some(ask) = asked.recv() => {
                // Not in the connection, which ends with whoever asked: what has begun is finished.
                let reload = Arc::clone(&reload);
                reloads.spawn(async move { drop(ask.send(reload().await)) });
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        while reloads.try_join_next().is_some() {}
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let mut builder = http1::Builder::new();
            builder.timer(TokioTimer::new()).header_read_timeout(CONTROL_HEAD_TIMEOUT);
            if let Err(error) = builder.serve_connection(TokioIo::new(stream), service).await {
                tracing::debug!(%error, "a connection of the control socket has ended");
            }
            drop(place);
        });
    }
}

/// The next connection, with its place. The others wait in the system's own queue.
async fn next(listener: &UnixListener, places: &Arc<Semaphore>) -> (Option<OwnedSemaphorePermit>, UnixStream) {
    let place = Arc::clone(places).acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (place, stream),
            Err(error) => {
                tracing::debug!(%error, "no connection of the control socket can be accepted");
                tokio::time::sleep(CONTROL_ACCEPT_REST).await;
            }
        }
    }
}

/// What a connection has.
#[derive(Clone)]
struct Counter {
    desk: Desk,
    reloads: mpsc::Sender<Reloading>,
}

/// Whoever asked for a reload.
pub(super) type Reloading = oneshot::Sender<Result<String, String>>;

/// A refusal, for a person.
#[derive(Debug)]
pub struct Refusal(pub(crate) StatusCode, pub(crate) String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(Answer { said: self.1 })).into_response()
    }
}

fn gone() -> Refusal {
    Refusal(StatusCode::SERVICE_UNAVAILABLE, "the worker has exited".to_owned())
}

async fn status(State(Counter { desk, .. }): State<Counter>) -> Result<Json<Status>, Refusal> {
    let looked = timeout(CONTROL_TIMEOUT, desk.control.look()).await;
    let slow = |_| Refusal(StatusCode::GATEWAY_TIMEOUT, format!("the worker did not answer in {CONTROL_TIMEOUT:?}"));
    let view = looked.map_err(slow)?.ok_or_else(gone)?;
    Ok(Json(Status::of(desk.id, desk.group, view)))
}

async fn order(
    State(Counter { desk, reloads }): State<Counter>,
    Json(ordered): Json<Ordered>,
) -> Result<Json<Answer>, Refusal> {
    let (command, said) = match ordered.order {
        Order::Pause { seconds } => (Command::Pause { span: span(seconds)? }, "paused: running tasks go on"),
        Order::Resume => (Command::Resume, "claiming again"),
        Order::Drain { seconds } => {
            (Command::Drain { within: span(seconds)? }, "draining: running tasks are finished, then the worker exits")
        }
        Order::Stop => {
            (Command::HandBack { within: None }, "stopping: running tasks are handed back, then the worker exits")
        }
        Order::HandBack { task } => return end(&desk.control, &task, claim::Order::HandBack, ordered.note).await,
        Order::Cancel { task } => return end(&desk.control, &task, claim::Order::Cancel, ordered.note).await,
        Order::Reload => {
            let (ask, answer) = oneshot::channel();
            reloads.send(ask).await.map_err(|_| gone())?;
            let reloaded = answer.await.map_err(|_| gone())?;
            let reloaded = reloaded.map_err(|error| Refusal(StatusCode::UNPROCESSABLE_ENTITY, error))?;
            return Ok(Json(Answer { said: reloaded }));
        }
    };
    if matches!(command, Command::Pause { .. } | Command::Resume) {
        let state = desk.control.look().await.ok_or_else(gone)?.state;
        if !matches!(state, view::State::Running | view::State::Paused) {
            let text = format!("the worker is {}, and claims nothing any more", state.as_str());
            return Err(Refusal(StatusCode::CONFLICT, text));
        }
    }
    desk.control.command(command, ordered.note).await;
    Ok(Json(Answer { said: said.to_owned() }))
}

fn span(seconds: Option<f64>) -> Result<Option<Duration>, Refusal> {
    let Some(seconds) = seconds else { return Ok(None) };
    if !(0.0..=SPAN_MAX_SECONDS).contains(&seconds) {
        let text = format!("a span has to be between 0 and {SPAN_MAX_SECONDS} seconds");
        return Err(Refusal(StatusCode::BAD_REQUEST, text));
    }
    Ok(Some(Duration::from_secs_f64(seconds)))
}

/// Which log, and whether to wait for more of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Which {
    task: String,
    follow: bool,
}

impl From<NotOne> for Refusal {
    fn from(not: NotOne) -> Self {
        let status = match not {
            NotOne::None { .. } => StatusCode::NOT_FOUND,
            NotOne::Several { .. } => StatusCode::CONFLICT,
            NotOne::Exited => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self(status, not.to_string())
    }
}

/// What a worker is asked is answered in time, or not at all.
async fn in_time<T>(asked: impl Future<Output = Result<T, NotOne>>) -> Result<T, Refusal> {
    let slow = |_| Refusal(StatusCode::GATEWAY_TIMEOUT, format!("the worker did not answer in {CONTROL_TIMEOUT:?}"));
    Ok(timeout(CONTROL_TIMEOUT, asked).await.map_err(slow)??)
}

async fn end(control: &Control, task: &str, order: claim::Order, note: Note) -> Result<Json<Answer>, Refusal> {
    let Told { run, obeyed } = in_time(control.end(task, order, note)).await?;
    let again = "others may claim it, and so may this worker where it is not paused";
    let what = match order {
        claim::Order::HandBack => "handed back",
        claim::Order::Cancel => "canceled",
    };
    let (outcome, then) = match obeyed {
        Obeyed::Ending(outcome) => (outcome, format!("is told to end, and is reported as {outcome} when it has")),
        Obeyed::Reporting(outcome) => (outcome, format!("has ended, and is reported as {outcome} now")),
        Obeyed::WhenGranted(outcome) => (outcome, format!("is being claimed, and is reported as {outcome} then")),
        Obeyed::NotAsked => {
            return Ok(Json(Answer { said: format!("{run} was not granted, and is not asked for again; {again}") }));
        }
        Obeyed::TooLate(outcome) => {
            let text = format!("{run} cannot be {what} any more: it has ended, and is being reported as {outcome}");
            return Err(Refusal(StatusCode::CONFLICT, text));
        }
        Obeyed::Lost(_) => {
            let text =
                format!("{run} cannot be {what} any more: its claim is lost, and what is left of it is being ended");
            return Err(Refusal(StatusCode::CONFLICT, text));
        }
    };
    if !order.is_met_by(outcome) {
        return Err(Refusal(StatusCode::CONFLICT, format!("{run} is not {what}: it {then}")));
    }
    let said = match order {
        claim::Order::HandBack => format!("{run} {then}; {again}"),
        claim::Order::Cancel => format!("{run} {then}"),
    };
    Ok(Json(Answer { said }))
}

/// Which task.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    task: String,
}

async fn show(
    State(Counter { desk, .. }): State<Counter>,
    Query(named): Query<Named>,
) -> Result<Json<Detail>, Refusal> {
    let Shown { mut detail, enclosure } = in_time(desk.control.show(&named.task)).await?;
    if let Some(enclosure) = enclosure {
        // A file system that hangs holds up who asks, and only for so long.
        let looked = tokio::task::spawn_blocking(move || (enclosure.processes(), enclosure.memory()));
        (detail.processes, detail.task.memory_bytes) =
            timeout(CONTROL_TIMEOUT, looked).await.ok().and_then(Result::ok).unwrap_or_default();
    }
    Ok(Json(detail))
}

async fn log(State(Counter { desk, .. }): State<Counter>, Query(which): Query<Which>) -> Result<Response, Refusal> {
    let log = in_time(desk.control.log(&which.task)).await.map_err(|Refusal(status, text)| {
        let more =
            if status == StatusCode::NOT_FOUND { "; `journeyman task log` reads the logs of ended tasks" } else { "" };
        Refusal(status, format!("{text}{more}"))
    })?;
    let (near, far) = tokio::io::duplex(CONTROL_READ_BYTES);
    let reader = Reader { log, file: None, at: 0, which, control: desk.control };
    let mut copying = JoinSet::new();
    copying.spawn(reader.copy(near));
    Ok(Body::from_stream(ReaderStream::new(Followed { far, _copying: copying })).into_response())
}

/// The reading end, which ends the copying when nobody reads any more.
struct Followed {
    far: DuplexStream,
    _copying: JoinSet<()>,
}

impl AsyncRead for Followed {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().far).poll_read(cx, buffer)
    }
}

/// A log from its start on.
struct Reader {
    log: TaskLog,
    file: Option<File>,
    at: u64,
    which: Which,
    control: Control,
}

impl Reader {
    async fn copy(mut self, mut to: DuplexStream) {
        loop {
            // Before reading, so that nothing that comes between is missed.
            let (seen, ended) = (self.log.bytes(), self.log.ended());
            // A slow disk holds up who reads, not the worker.
            let mut reader = self;
            let Ok((reader, read)) = tokio::task::spawn_blocking(move || {
                let read = reader.read();
                (reader, read)
            })
            .await
            else {
                return;
            };
            self = reader;
            match read {
                Ok(bytes) if !bytes.is_empty() => {
                    if to.write_all(&bytes).await.is_err() {
                        return;
                    }
                    continue;
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(%error, "a task's log that is followed cannot be read");
                    return;
                }
            }
            if ended || !self.which.follow {
                return;
            }
            tokio::select! {
                () = self.log.grown(seen) => {}
                // A log that is never ended, because its claim was lost, is noticed by looking.
                () = tokio::time::sleep(CONTROL_FOLLOW_CHECK) => {
                    if self.control.log(&self.which.task).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    fn read(&mut self) -> io::Result<Vec<u8>> {
        if self.file.is_none() {
            self.file = match File::open(self.log.path()) {
                Ok(file) => Some(file),
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
        }
        let Some(file) = &self.file else { return Ok(Vec::new()) };
        let mut buffer = vec![0; CONTROL_READ_BYTES];
        let taken = file.read_at(&mut buffer, self.at)?;
        buffer.truncate(taken);
        self.at += taken as u64;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;
    use tokio::net::UnixStream;

    use super::*;
    use crate::worker::{Settings, Worker};

    fn desk(reload: Arc<Reload>) -> Desk {
        let control = Worker::new(Settings::default(), Vec::new()).control();
        Desk { id: "w".to_owned(), group: "g".to_owned(), control, reload }
    }

    #[tokio::test]
    async fn a_reload_whose_client_hangs_up_is_finished() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let [began, go_on, ended] = [(); 3].map(|()| Arc::new(Semaphore::new(0)));
        let reload: Arc<Reload> = {
            let (began, go_on, ended) = (Arc::clone(&began), Arc::clone(&go_on), Arc::clone(&ended));
            Arc::new(move || {
                let (began, go_on, ended) = (Arc::clone(&began), Arc::clone(&go_on), Arc::clone(&ended));
                Box::pin(async move {
                    began.add_permits(1);
                    go_on.acquire().await.unwrap().forget();
                    ended.add_permits(1);
                    Ok("done".to_owned())
                })
            })
        };
        let mut serving = JoinSet::new();
        serving.spawn(serve(Socket::listen(&path).unwrap(), desk(reload)));
        let body = r#"{"order":"reload","note":{"by":"ana"}}"#;
        let request = format!(
            "POST /v1/orders HTTP/1.1\r\nhost: w\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let asks = async || {
            let mut stream = UnixStream::connect(&path).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            stream
        };
        let stream = asks().await;
        began.acquire().await.unwrap().forget();
        drop(stream);
        // Another one, so that the worker has seen that nobody listens to the first.
        let mut other = asks().await;
        began.acquire().await.unwrap().forget();
        go_on.add_permits(2);
        let both = timeout(Duration::from_secs(60), ended.acquire_many(2)).await;
        both.expect("the first one is finished as well").unwrap().forget();
        let mut answer = vec![0; 1024];
        let read = other.read(&mut answer).await.unwrap();
        assert!(String::from_utf8_lossy(&answer[..read]).contains("done"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_socket_that_was_removed_is_listened_on_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let mut serving = JoinSet::new();
        let reload: Arc<Reload> = Arc::new(|| Box::pin(std::future::pending()));
        serving.spawn(serve(Socket::listen(&path).unwrap(), desk(reload)));
        std::fs::remove_file(&path).unwrap();
        let again = async {
            while UnixStream::connect(&path).await.is_err() {
                tokio::time::sleep(CONTROL_ACCEPT_REST).await;
            }
        };
        timeout(CONTROL_SOCKET_CHECK * 2, again).await.unwrap();
    }
}
