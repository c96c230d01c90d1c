//! A local metadata service: that of EC2, Google or Azure, as documented, with faults on request.
//!
//! Raw TCP, one request a connection, so that it can also send invalid replies.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Limit for everything that a test waits for.
pub const STEP_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    Ec2,
    Google,
    Azure,
}

/// Happens to one request instead of a reply.
#[derive(Debug, Clone, Copy)]
pub enum Fault {
    ServerError,
    Reset,
    ResetMidBody,
    Html,
    NoText,
    EmptyBody,
    Redirect,
    Flood,
    Silence,
}

pub const FAULTS: [Fault; 9] = [
    Fault::ServerError,
    Fault::Reset,
    Fault::ResetMidBody,
    Fault::Html,
    Fault::NoText,
    Fault::EmptyBody,
    Fault::Redirect,
    Fault::Flood,
    Fault::Silence,
];

/// Changing it wakes the long polls.
#[derive(Debug)]
pub struct State {
    pub faults: VecDeque<Fault>,
    /// Offset of its clock.
    pub clock_s: i64,
    /// EC2: the accepted tokens, and the lifetime of a new one.
    pub tokens: Vec<String>,
    pub token_life_s: u64,
    pub accept_tokens: bool,
    pub instance_action: Option<String>,
    /// Google.
    pub flavor: Option<&'static str>,
    pub preempted: &'static str,
    pub maintenance: &'static str,
    /// Azure.
    pub vm: &'static str,
    pub events: String,
    pub first_list_takes: Duration,
    lists: u32,
    given: u32,
}

struct Shared {
    cloud: Cloud,
    state: Mutex<State>,
    changes: watch::Sender<u64>,
    requests: Mutex<Vec<String>>,
    questions: watch::Sender<usize>,
}

/// Stops when dropped.
pub struct Metadata {
    address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

#[derive(Debug, Default)]
struct Request {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
}

impl Request {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn query(&self, name: &str) -> Option<&str> {
        let query = self.path.split_once('?')?.1;
        query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn plain(&self) -> &str {
        self.path.split('?').next().unwrap_or_default()
    }
}

impl Metadata {
    pub async fn start(cloud: Cloud) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a loopback port is free");
        let address = listener.local_addr().expect("a bound socket has an address");
        let state = State {
            faults: VecDeque::new(),
            clock_s: 0,
            tokens: Vec::new(),
            token_life_s: 21_600,
            accept_tokens: true,
            instance_action: None,
            flavor: Some("Google"),
            preempted: "FALSE",
            maintenance: "NONE",
            vm: "vmss_7",
            events: "[]".to_owned(),
            first_list_takes: Duration::ZERO,
            lists: 0,
            given: 0,
        };
        let shared = Arc::new(Shared {
            cloud,
            state: Mutex::new(state),
            changes: watch::Sender::new(0),
            requests: Mutex::default(),
            questions: watch::Sender::new(0),
        });
        let mut tasks = JoinSet::new();
        let serving = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&serving)));
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, shared, _tasks: tasks }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn change(&self, how: impl FnOnce(&mut State)) {
        how(&mut self.shared.state());
        self.shared.changes.send_modify(|changes| *changes += 1);
    }

    /// A later time on its clock.
    pub fn in_seconds(&self, seconds: i64) -> Timestamp {
        Timestamp::now() + SignedDuration::from_secs(seconds + self.shared.state().clock_s)
    }

    /// The requests so far, as `METHOD path`.
    pub fn requests(&self) -> Vec<String> {
        self.shared.requests.lock().clone()
    }

    /// Waits for `times` more requests with these words.
    pub async fn wait_for_requests(&self, words: &str, times: usize) {
        self.wait_until_requested(words, self.count(words) + times).await;
    }

    fn count(&self, words: &str) -> usize {
        self.requests().iter().filter(|line| line.contains(words)).count()
    }

    /// Waits for requests with these words, counted from the start.
    pub async fn wait_until_requested(&self, words: &str, enough: usize) {
        let mut questions = self.shared.questions.subscribe();
        let reached = questions.wait_for(|_| self.count(words) >= enough);
        drop(tokio::time::timeout(STEP_TIMEOUT, reached).await.expect("requests arrive").expect("it is there"));
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

struct Answer {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn plain(status: u16, body: impl Into<Vec<u8>>) -> Answer {
    Answer { status, headers: Vec::new(), body: body.into() }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let Some(request) = read(&mut stream).await else { return };
    let fault = shared.state().faults.pop_front();
    let questions = {
        let mut all = shared.requests.lock();
        all.push(format!("{} {}", request.method, request.path));
        all.len()
    };
    // Not under that lock: a waiting test takes it while this one is held.
    shared.questions.send_replace(questions);
    let mut bytes = match fault {
        Some(Fault::ServerError) => encode_answer(&shared, plain(500, "busy")),
        Some(Fault::Html) => encode_answer(&shared, plain(200, "<html>sign in</html>")),
        Some(Fault::NoText) => encode_answer(&shared, plain(200, [0xff, 0xfe, 0x00])),
        Some(Fault::EmptyBody) => encode_answer(&shared, plain(200, "")),
        Some(Fault::Redirect) => {
            let elsewhere = vec![("location", "http://127.0.0.1:9/elsewhere".to_owned())];
            encode_answer(&shared, Answer { status: 302, headers: elsewhere, body: Vec::new() })
        }
        Some(Fault::Reset) => {
            stream.set_zero_linger().ok();
            return;
        }
        Some(Fault::ResetMidBody) => {
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"act").await.ok();
            stream.set_zero_linger().ok();
            return;
        }
        Some(Fault::Flood) => {
            let mut alive = stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await.is_ok();
            let flood = vec![b' '; 64 << 10];
            while alive {
                alive = stream.write_all(&flood).await.is_ok();
            }
            return;
        }
        Some(Fault::Silence) => {
            // Until the client closes the connection.
            stream.read_exact(&mut [0]).await.ok();
            return;
        }
        None => {
            let answer = match shared.cloud {
                Cloud::Ec2 => ec2(&shared, &request),
                Cloud::Google => google(&shared, &request).await,
                Cloud::Azure => azure(&shared, &request).await,
            };
            encode_answer(&shared, answer)
        }
    };
    stream.write_all(&std::mem::take(&mut bytes)).await.ok();
    stream.shutdown().await.ok();
}

fn encode_answer(shared: &Shared, answer: Answer) -> Vec<u8> {
    let date = Timestamp::now() + SignedDuration::from_secs(shared.state().clock_s);
    let date = date.strftime("%a, %d %b %Y %H:%M:%S GMT");
    let mut head = format!(
        "HTTP/1.1 {} Said\r\nconnection: close\r\ndate: {date}\r\ncontent-length: {}\r\n",
        answer.status,
        answer.body.len()
    );
    for (name, value) in answer.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("\r\n");
    [head.into_bytes(), answer.body].concat()
}

/// Issues tokens to requests with a lifetime, and rejects other requests without a valid token.
fn ec2(shared: &Shared, request: &Request) -> Answer {
    let mut state = shared.state();
    if request.plain() == "/latest/api/token" {
        let life = request.header("x-aws-ec2-metadata-token-ttl-seconds").and_then(|text| text.parse::<u64>().ok());
        if request.method != "PUT" || !life.is_some_and(|life| (1..=21_600).contains(&life)) {
            return plain(400, "");
        }
        state.given += 1;
        let token = format!("token-{}==", state.given);
        state.tokens.push(token.clone());
        let life = vec![("x-aws-ec2-metadata-token-ttl-seconds", state.token_life_s.to_string())];
        return Answer { status: 200, headers: life, body: token.into_bytes() };
    }
    let known = request.header("x-aws-ec2-metadata-token").is_some_and(|token| state.tokens.iter().any(|t| t == token));
    if !known || !state.accept_tokens {
        return plain(401, "");
    }
    let found = match request.plain() {
        "/latest/meta-data/spot/instance-action" => state.instance_action.clone(),
        _ => None,
    };
    found.map_or_else(|| plain(404, "<h1>404 - Not Found</h1>"), |body| plain(200, body))
}

/// Returns values with ETags; a long poll waits while the value has the given ETag.
async fn google(shared: &Shared, request: &Request) -> Answer {
    if request.header("metadata-flavor") != Some("Google") {
        return plain(403, "Missing Metadata-Flavor:Google header.");
    }
    let value = || {
        let state = shared.state();
        match request.plain() {
            "/computeMetadata/v1/instance/preempted" => Some(state.preempted),
            "/computeMetadata/v1/instance/maintenance-event" => Some(state.maintenance),
            "/computeMetadata/v1/instance/id" => Some("1234567890"),
            _ => None,
        }
    };
    let flavored = |status, value: &str, etag: String| {
        let flavor = shared.state().flavor;
        let mut headers = vec![("etag", etag)];
        headers.extend(flavor.map(|flavor| ("Metadata-Flavor", flavor.to_owned())));
        Answer { status, headers, body: value.as_bytes().to_vec() }
    };
    let etag = |value: &str| format!("etag/{value}");
    let Some(first) = value() else { return flavored(404, "", String::new()) };
    if request.query("wait_for_change") == Some("true") {
        let named =
            request.query("last_etag").map(|text| urlencoding::decode(text).expect("it is encoded").into_owned());
        let known = named.unwrap_or_else(|| etag(first));
        let longest = request.query("timeout_sec").and_then(|text| text.parse().ok()).unwrap_or(u64::MAX >> 20);
        let mut changes = shared.changes.subscribe();
        let changed = changes.wait_for(|_| value().is_some_and(|value| etag(value) != known));
        // Without a change it returns the current value.
        drop(tokio::time::timeout(Duration::from_secs(longest), changed).await);
    }
    let now = value().unwrap_or(first);
    flavored(200, now, etag(now))
}

/// The name of the VM at once, the first list of events after a delay.
async fn azure(shared: &Shared, request: &Request) -> Answer {
    if request.header("metadata") != Some("true") {
        return plain(400, "{\"error\":\"Bad request. Required metadata header not specified\"}");
    }
    match request.plain() {
        "/metadata/instance/compute" if request.query("api-version").is_some() => {
            plain(200, format!("{{\"name\":\"{}\",\"vmId\":\"x\"}}", shared.state().vm))
        }
        "/metadata/scheduledevents" if request.query("api-version") == Some("2020-07-01") => {
            let wait = {
                let mut state = shared.state();
                state.lists += 1;
                if state.lists == 1 { state.first_list_takes } else { Duration::ZERO }
            };
            tokio::time::sleep(wait).await;
            let state = shared.state();
            plain(200, format!("{{\"DocumentIncarnation\":{},\"Events\":{}}}", state.lists, state.events))
        }
        _ => plain(404, "{}"),
    }
}

async fn read(stream: &mut TcpStream) -> Option<Request> {
    let mut bytes = Vec::new();
    let mut byte = [0; 1];
    while !bytes.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).await.ok()? == 0 {
            return None;
        }
        bytes.push(byte[0]);
    }
    let head = String::from_utf8(bytes).ok()?;
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ').map(str::to_owned);
    let headers = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    Some(Request { method: first.next()?, path: first.next()?, headers })
}
