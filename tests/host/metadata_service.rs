//! A local metadata service: that of EC2, Google or Azure, as documented, with faults on request.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::support::gremlin::{self, Act, Asked, Gremlin, answer_with, head};
use crate::support::within;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    Ec2,
    Google,
    Azure,
}

/// Faulty replies.
pub fn faults() -> [Act; 9] {
    [
        server_error(),
        RESET,
        Act::SayAndReset(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"act".to_vec()),
        answer_with(200, &[], "<html>sign in</html>"),
        answer_with(200, &[], [0xff, 0xfe, 0x00]),
        answer_with(200, &[], ""),
        answer_with(302, &[("location", "http://127.0.0.1:9/elsewhere")], ""),
        Act::SayAndFlood(head(200, &[])),
        Act::Silence,
    ]
}

pub const RESET: Act = Act::SayAndReset(Vec::new());

pub fn server_error() -> Act {
    answer_with(500, &[], "busy")
}

/// Changing it wakes the long polls.
#[derive(Debug)]
pub struct State {
    /// Happen to one request each instead of a reply.
    pub faults: VecDeque<Act>,
    /// Offset of its clock.
    pub clock_s: i64,
    /// EC2: the accepted tokens.
    pub tokens: Vec<String>,
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
    given: u32,
}

impl Default for State {
    fn default() -> Self {
        Self {
            faults: VecDeque::new(),
            clock_s: 0,
            tokens: Vec::new(),
            accept_tokens: true,
            instance_action: None,
            flavor: Some("Google"),
            preempted: "FALSE",
            maintenance: "NONE",
            vm: "vmss_7",
            events: "[]".to_owned(),
            first_list_takes: Duration::ZERO,
            given: 0,
        }
    }
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changes: watch::Sender<u64>,
}

/// Stops when dropped.
pub struct Metadata {
    server: Gremlin,
    shared: Arc<Shared>,
}

impl Metadata {
    pub async fn start(cloud: Cloud) -> Self {
        let shared = Arc::<Shared>::default();
        let serving = Arc::clone(&shared);
        let server = Gremlin::responding(move |request| {
            let (shared, request) = (Arc::clone(&serving), request.clone());
            let fault = shared.state().faults.pop_front();
            Box::pin(async move {
                match (fault, cloud) {
                    (Some(fault), _) => fault,
                    (None, Cloud::Ec2) => ec2(&shared, &request),
                    (None, Cloud::Google) => google(&shared, &request).await,
                    (None, Cloud::Azure) => azure(&shared, &request).await,
                }
            })
        });
        Self { server: server.await, shared }
    }

    pub fn url(&self) -> String {
        self.server.url()
    }

    pub fn change(&self, how: impl FnOnce(&mut State)) {
        how(&mut self.shared.state());
        self.shared.changes.send_modify(|changes| *changes += 1);
    }

    /// A later time on its clock.
    pub fn in_seconds(&self, seconds: i64) -> Timestamp {
        Timestamp::now() + SignedDuration::from_secs(seconds + self.shared.state().clock_s)
    }

    /// The lines of the requests so far.
    pub fn requests(&self) -> Vec<String> {
        self.server.asked().into_iter().map(|asked| asked.line).collect()
    }

    /// Waits for `times` more requests with these words.
    pub async fn wait_for_requests(&self, words: &str, times: usize) {
        self.wait_until_requested(words, count(&self.server.asked(), words) + times).await;
    }

    /// Waits for requests with these words, counted from the start.
    pub async fn wait_until_requested(&self, words: &str, times: usize) {
        let reached = self.server.wait_asked(|asked| count(asked, words) >= times);
        within("the requests", reached).await;
    }
}

fn count(asked: &[Asked], words: &str) -> usize {
    asked.iter().filter(|asked| asked.line.contains(words)).count()
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn reply(&self, status: u16, headers: &[(&str, &str)], body: impl AsRef<[u8]>) -> Act {
        let date = gremlin::date(self.state().clock_s);
        answer_with(status, &[headers, &[("date", &date)]].concat(), body)
    }
}

fn path(request: &Asked) -> &str {
    request.line.split([' ', '?']).nth(1).unwrap_or_default()
}

fn query<'a>(request: &'a Asked, name: &str) -> Option<&'a str> {
    let query = request.line.split(' ').nth(1)?.split_once('?')?.1;
    query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Issues tokens to requests with a lifetime, and rejects other requests without a valid token.
fn ec2(shared: &Shared, request: &Asked) -> Act {
    let ttl = "x-aws-ec2-metadata-token-ttl-seconds";
    if path(request) == "/latest/api/token" {
        let life = request.header(ttl).and_then(|text| text.parse::<u64>().ok());
        if !request.line.starts_with("PUT ") || !life.is_some_and(|life| (1..=21_600).contains(&life)) {
            return shared.reply(400, &[], "");
        }
        let token = {
            let mut state = shared.state();
            state.given += 1;
            let token = format!("token-{}==", state.given);
            state.tokens.push(token.clone());
            token
        };
        return shared.reply(200, &[(ttl, "21600")], token);
    }
    let (accepted, action) = {
        let state = shared.state();
        let token = request.header("x-aws-ec2-metadata-token");
        let known = token.is_some_and(|token| state.tokens.iter().any(|known| known == token));
        (known && state.accept_tokens, state.instance_action.clone())
    };
    match action.filter(|_| path(request) == "/latest/meta-data/spot/instance-action") {
        _ if !accepted => shared.reply(401, &[], ""),
        Some(body) => shared.reply(200, &[], body),
        None => shared.reply(404, &[], "<h1>404 - Not Found</h1>"),
    }
}

/// Returns values with ETags; a long poll waits while the value has the given ETag.
async fn google(shared: &Shared, request: &Asked) -> Act {
    if request.header("metadata-flavor") != Some("Google") {
        return shared.reply(403, &[], "Missing Metadata-Flavor:Google header.");
    }
    let value = || {
        let state = shared.state();
        match path(request) {
            "/computeMetadata/v1/instance/preempted" => Some(state.preempted),
            "/computeMetadata/v1/instance/maintenance-event" => Some(state.maintenance),
            "/computeMetadata/v1/instance/id" => Some("1234567890"),
            _ => None,
        }
    };
    let etag = |value: &str| format!("etag/{value}");
    let Some(first) = value() else { return shared.reply(404, &[], "") };
    if query(request, "wait_for_change") == Some("true") {
        let named =
            query(request, "last_etag").map(|text| urlencoding::decode(text).expect("it is encoded").into_owned());
        let known = named.unwrap_or_else(|| etag(first));
        let longest = query(request, "timeout_sec").and_then(|text| text.parse().ok()).unwrap_or(u64::MAX >> 20);
        let mut changes = shared.changes.subscribe();
        let changed = changes.wait_for(|_| value().is_some_and(|value| etag(value) != known));
        // Without a change it returns the current value.
        drop(tokio::time::timeout(Duration::from_secs(longest), changed).await);
    }
    let (now, flavor) = (value().unwrap_or(first), shared.state().flavor);
    let mut headers = vec![("etag", etag(now))];
    headers.extend(flavor.map(|flavor| ("Metadata-Flavor", flavor.to_owned())));
    let headers: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
    shared.reply(200, &headers, now)
}

/// The name of the VM at once, the first list of events after a delay.
async fn azure(shared: &Shared, request: &Asked) -> Act {
    if request.header("metadata") != Some("true") {
        return shared.reply(400, &[], "{\"error\":\"Bad request. Required metadata header not specified\"}");
    }
    match path(request) {
        "/metadata/instance/compute" if query(request, "api-version").is_some() => {
            let vm = shared.state().vm;
            shared.reply(200, &[], format!("{{\"name\":\"{vm}\",\"vmId\":\"x\"}}"))
        }
        "/metadata/scheduledevents" if query(request, "api-version") == Some("2020-07-01") => {
            let delay = std::mem::take(&mut shared.state().first_list_takes);
            tokio::time::sleep(delay).await;
            let events = shared.state().events.clone();
            shared.reply(200, &[], format!("{{\"DocumentIncarnation\":1,\"Events\":{events}}}"))
        }
        _ => shared.reply(404, &[], "{}"),
    }
}
