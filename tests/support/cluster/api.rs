//! The HTTP side of the stand-in: routes, faults, watches and logs.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::{Request, Response, header};
use futures_util::{TryStreamExt as _, stream};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::store::{Key, Kind, Refused, Selector, Store, kind_of};
use super::{Call, How, Shared, State, TOKEN};

const BODY_BYTES_MAX: usize = 3 << 20;

pub(super) async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let mut open = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        while open.try_join_next().is_some() {}
        open.spawn(serve_connection(stream, Arc::clone(&shared)));
    }
}

async fn serve_connection(stream: TcpStream, shared: Arc<Shared>) {
    stream.set_nodelay(true).expect("an open socket");
    let service = service_fn(|request| answer(request, Arc::clone(&shared)));
    // A fault closes it.
    drop(http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
}

/// Why a connection is closed without an answer.
#[derive(Debug, thiserror::Error)]
#[error("a fault of the test")]
struct Closed;

/// A request, in the words of the API server.
pub(super) struct Asked {
    verb: &'static str,
    kind: &'static Kind,
    key: Key,
    subresource: String,
    query: BTreeMap<String, String>,
    /// Only the metadata of objects is wanted.
    is_partial: bool,
    body: Value,
}

impl Asked {
    fn query(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    fn is_set(&self, name: &str) -> bool {
        ["true", "1"].contains(&self.query(name))
    }

    /// The object as it stands alone in an answer.
    fn show(&self, object: &Value) -> Value {
        let mut shown = if self.is_partial { json!({ "metadata": object["metadata"] }) } else { object.clone() };
        let (kind, version) =
            if self.is_partial { ("PartialObjectMetadata", "meta.k8s.io/v1") } else { (self.kind.kind, "v1") };
        shown["kind"] = json!(kind);
        shown["apiVersion"] = json!(version);
        shown
    }

    fn selector(&self) -> Selector {
        Selector::parse(self.query("labelSelector"), self.query("fieldSelector"))
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>) -> Result<Response<Body>, Closed> {
    let (head, body) = request.into_parts();
    let bearer = head.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if bearer.and_then(|value| value.strip_prefix("Bearer ")) != Some(TOKEN) {
        return Ok(failure(&shared, &Refused::new(401, "Unauthorized", "Unauthorized")));
    }
    let asked = match to_bytes(Body::new(body), BODY_BYTES_MAX).await {
        Ok(body) => parse(&head, &body),
        Err(_) => Err(Refused::new(413, "RequestEntityTooLarge", "limit is 3145728")),
    };
    let asked = match asked {
        Ok(asked) => asked,
        Err(refused) => return Ok(failure(&shared, &refused)),
    };
    let fault = shared.note(&asked);
    match &fault {
        Some(How::Status { code, message }) => {
            return Ok(failure(&shared, &Refused::new(*code, "Because", message.as_str())));
        }
        Some(How::Refuse) => return Err(Closed),
        Some(How::Hold(gate)) => gate.acquire().await.expect("it is not closed").forget(),
        Some(How::LoseAnswer) | None => {}
    }
    let answer = perform(asked, &shared).unwrap_or_else(|refused| failure(&shared, &refused));
    match fault {
        Some(How::LoseAnswer) => Err(Closed),
        Some(How::Status { .. } | How::Refuse | How::Hold(_)) | None => Ok(answer),
    }
}

impl Shared {
    /// Keeps the call for the test, and takes the fault that is meant for it.
    fn note(&self, asked: &Asked) -> Option<How> {
        let mut state = self.state.lock();
        let mut resource = asked.key.resource.to_owned();
        if !asked.subresource.is_empty() {
            resource = format!("{resource}/{}", asked.subresource);
        }
        let meant = state.faults.iter_mut().find(|fault| {
            fault.times > 0 && [asked.verb, "*"].contains(&fault.verb) && [&*resource, "*"].contains(&fault.resource)
        });
        let how = meant.map(|fault| {
            fault.times -= 1;
            fault.how.clone()
        });
        let name = Some(&asked.key.name).filter(|name| !name.is_empty());
        let name = name.map_or_else(|| asked.body["metadata"]["name"].as_str().unwrap_or_default(), String::as_str);
        let call = Call {
            verb: asked.verb,
            resource,
            name: name.to_owned(),
            query: asked.query.clone(),
            body: asked.body.clone(),
        };
        state.calls.push(call);
        drop(state);
        self.changed.send_replace(());
        how
    }
}

fn parse(head: &axum::http::request::Parts, body: &[u8]) -> Result<Asked, Refused> {
    let path: Vec<_> = head.uri.path().split('/').skip(1).collect();
    let (["api", "v1", "namespaces", namespace, resource], rest) =
        path.split_at_checked(5).ok_or_else(Refused::no_such_route)?
    else {
        return Err(Refused::no_such_route());
    };
    let kind = kind_of(resource).ok_or_else(Refused::no_such_route)?;
    let query: BTreeMap<_, _> =
        url::form_urlencoded::parse(head.uri.query().unwrap_or_default().as_bytes()).into_owned().collect();
    let is_watch = query.get("watch").is_some_and(|value| ["true", "1"].contains(&value.as_str()));
    let name = rest.first().copied().unwrap_or_default();
    let verb = match (head.method.as_str(), name.is_empty()) {
        ("GET", true) if is_watch => "watch",
        ("GET", true) => "list",
        ("GET", false) => "get",
        ("POST", true) => "create",
        ("DELETE", true) => "deletecollection",
        ("DELETE", false) => "delete",
        _ => {
            let why = "the server does not allow this method on the requested resource";
            return Err(Refused::new(405, "MethodNotAllowed", why));
        }
    };
    let text = |name| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let body = match body {
        [] => Value::Null,
        body => serde_json::from_slice(body).map_err(|error| Refused::bad_request(error.to_string()))?,
    };
    if !body.is_null() && text(header::CONTENT_TYPE).split(';').next() != Some("application/json") {
        return Err(Refused::new(415, "UnsupportedMediaType", "the body of the request was in an unknown format"));
    }
    Ok(Asked {
        verb,
        kind,
        key: Key { resource: kind.resource, namespace: (*namespace).to_owned(), name: name.to_owned() },
        subresource: rest.get(1).copied().unwrap_or_default().to_owned(),
        query,
        is_partial: text(header::ACCEPT).contains("as=PartialObjectMetadata"),
        body,
    })
}

fn perform(asked: Asked, shared: &Arc<Shared>) -> Result<Response<Body>, Refused> {
    let mut state = shared.state.lock();
    let store = &mut state.store;
    let key = &asked.key;
    let is_pod = asked.kind.kind == "Pod";
    let (code, answer) = match (asked.verb, asked.subresource.as_str()) {
        ("get", "log") if is_pod => {
            drop(state);
            return log(asked, shared);
        }
        ("watch", "") => {
            drop(state);
            return Ok(watch(asked, shared));
        }
        ("create", "") => (201, asked.show(&*store.create(asked.kind, &key.namespace, asked.body.clone())?)),
        ("get", "") => (200, asked.show(store.get(key)?)),
        ("get", "status") if is_pod => (200, asked.show(store.get(key)?)),
        ("list", "") => (200, list(&asked, store, &asked.selector())),
        ("delete", "") => {
            let grace = asked.query("gracePeriodSeconds").parse::<i64>();
            let mut options = asked.body.clone();
            if let Ok(grace) = grace {
                options["gracePeriodSeconds"] = json!(grace);
            }
            let gone = store.delete(key, &options)?;
            let details = json!({ "name": key.name, "kind": key.resource, "uid": gone["metadata"]["uid"] });
            (200, if is_pod { asked.show(&gone) } else { done(&details) })
        }
        ("deletecollection", "") => {
            let selector = asked.selector();
            let answer = list(&asked, store, &selector);
            let chosen = store.list(key.resource, &key.namespace).filter(|(_, object)| selector.matches(object));
            let chosen: Vec<_> = chosen.map(|(key, _)| key.clone()).collect();
            for key in chosen {
                store.delete(&key, &asked.body)?;
            }
            (200, answer)
        }
        _ => return Err(Refused::no_such_route()),
    };
    drop(state);
    shared.changed.send_replace(());
    Ok(success(shared, code, &answer))
}

fn done(details: &Value) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details })
}

fn list(asked: &Asked, store: &Store, selector: &Selector) -> Value {
    let found = store.list(asked.key.resource, &asked.key.namespace).filter(|(_, object)| selector.matches(object));
    let metadata = json!({ "resourceVersion": store.version.to_string() });
    if asked.is_partial {
        let items: Vec<_> = found.map(|(_, object)| asked.show(object)).collect();
        return json!({ "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": metadata, "items": items });
    }
    let items: Vec<_> = found.map(|(_, object)| object).collect();
    json!({ "kind": format!("{}List", asked.kind.kind), "apiVersion": "v1", "metadata": metadata, "items": items })
}

/// What an open answer does next.
enum Next {
    Say(String),
    Last(String),
    Cut,
    Wait,
}

/// A body that grows with the state.
fn growing(shared: &Arc<Shared>, ends_at: Option<Instant>, next: impl FnMut(&State) -> Next + Send + 'static) -> Body {
    let parts = (next, Arc::clone(shared), shared.changed.subscribe(), ends_at);
    let pieces = stream::unfold(Some(parts), |parts| async {
        let (mut next, shared, mut changed, mut ends_at) = parts?;
        loop {
            changed.borrow_and_update();
            let step = next(&shared.state.lock());
            match step {
                Next::Say(text) => return Some((Ok(text), Some((next, shared, changed, ends_at)))),
                Next::Last(text) => return Some((Ok(text), None)),
                Next::Cut => return Some((Err(cut().await), None)),
                Next::Wait => {}
            }
            tokio::select! {
                _ = changed.changed() => {}
                () = tokio::time::sleep_until(ends_at.unwrap_or_else(Instant::now)), if ends_at.is_some() => ends_at = None,
            }
        }
    });
    Body::from_stream(pieces.map_ok(Bytes::from))
}

/// Counts a watch while it is open.
struct OpenWatch(Arc<Shared>);

impl OpenWatch {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.state.lock().watches += 1;
        shared.changed.send_replace(());
        Self(Arc::clone(shared))
    }
}

impl Drop for OpenWatch {
    fn drop(&mut self) {
        self.0.state.lock().watches -= 1;
        self.0.changed.send_replace(());
    }
}

fn watch(asked: Asked, shared: &Arc<Shared>) -> Response<Body> {
    let selector = asked.selector();
    let from = asked.query("resourceVersion").parse().unwrap_or(0);
    let ends_at = Instant::now() + Duration::from_secs(asked.query("timeoutSeconds").parse().unwrap_or(3600));
    let state = shared.state.lock();
    let is_expired = from != 0 && from < state.store.compacted;
    let (cuts, mut seen) = (state.watch_cuts, from);
    let mut lines = String::new();
    if from == 0 {
        let found = state.store.list(asked.key.resource, &asked.key.namespace);
        lines.extend(found.filter(|(_, one)| selector.matches(one)).map(|(_, one)| event("ADDED", &asked.show(one))));
        seen = state.store.version;
    }
    drop(state);
    let open = OpenWatch::new(shared);
    let body = growing(shared, Some(ends_at), move |state| {
        let _open = &open;
        if state.watch_cuts > cuts {
            return Next::Cut;
        }
        if state.silent {
            return Next::Wait;
        }
        if is_expired {
            return Next::Last(event("ERROR", &Refused::expired(seen, state.store.compacted).1));
        }
        let mut lines = std::mem::take(&mut lines);
        let new = &state.store.changes[state.store.changes.partition_point(|change| change.version <= seen)..];
        for change in
            new.iter().filter(|one| one.key.resource == asked.key.resource && one.key.namespace == asked.key.namespace)
        {
            let [before, after] =
                [&change.before, &change.after].map(|one| one.as_deref().filter(|one| selector.matches(one)));
            let (kind, object) = match (before, after) {
                (None, Some(after)) => ("ADDED", after),
                (Some(_), Some(after)) => ("MODIFIED", after),
                (Some(before), None) => ("DELETED", before),
                (None, None) => continue,
            };
            let mut object = asked.show(object);
            object["metadata"]["resourceVersion"] = json!(change.version.to_string());
            lines += &event(kind, &object);
        }
        seen = state.store.version;
        let is_over = Instant::now() >= ends_at;
        if asked.is_set("allowWatchBookmarks") && is_over {
            let mark = json!({ "metadata": { "resourceVersion": seen.to_string(), "creationTimestamp": null } });
            lines += &event("BOOKMARK", &asked.show(&mark));
        }
        match lines.is_empty() {
            _ if is_over => Next::Last(lines),
            false => Next::Say(lines),
            true => Next::Wait,
        }
    });
    stamped(shared, 200, "application/json", body)
}

fn event(kind: &str, object: &Value) -> String {
    json!({ "type": kind, "object": object }).to_string() + "\n"
}

/// The container whose log is read.
fn log_container(pod: &Value, asked: &Asked) -> Result<String, Refused> {
    let (name, container) = (&asked.key.name, asked.query("container"));
    let mut all = ["containers", "initContainers"].into_iter().flat_map(|list| super::names(pod, list));
    if !all.any(|one| one == container) {
        return Err(Refused::bad_request(format!("container {container} is not valid for pod {name}")));
    }
    let status = super::container_status(pod, container).unwrap_or(&Value::Null);
    if !pod["spec"]["nodeName"].is_null()
        && status["state"]["running"].is_null()
        && status["state"]["terminated"].is_null()
    {
        let reason = status["state"]["waiting"]["reason"].as_str().unwrap_or("ContainerCreating");
        let why = format!("container \"{container}\" in pod \"{name}\" is waiting to start: {reason}");
        return Err(Refused::bad_request(why));
    }
    Ok(container.to_owned())
}

fn log(asked: Asked, shared: &Arc<Shared>) -> Result<Response<Body>, Refused> {
    let state = shared.state.lock();
    let pod = state.store.get(&asked.key)?;
    let container = log_container(pod, &asked)?;
    let since = match asked.query("sinceTime") {
        "" => Timestamp::MIN,
        // The API server hands whole seconds to the kubelet.
        text => match text.parse::<Timestamp>() {
            Ok(time) => Timestamp::from_second(time.as_second()).expect("a time"),
            Err(error) => return Err(Refused::bad_request(error.to_string())),
        },
    };
    let of = (super::uid(pod), container.clone());
    // Before a pod has a node there is no log to follow.
    let follows = asked.is_set("follow") && !pod["spec"]["nodeName"].is_null();
    let (cuts, mut sent) = (state.log_cuts, 0);
    drop(state);
    let body = growing(shared, None, move |state| {
        if state.log_cuts > cuts {
            return Next::Cut;
        }
        let (mut text, lines) = (String::new(), state.store.log(&of, since));
        for (at, line) in lines.iter().skip(sent) {
            if asked.is_set("timestamps") {
                text += &at.strftime("%Y-%m-%dT%H:%M:%S%.9fZ ").to_string();
            }
            text += line;
            text.push('\n');
        }
        sent = lines.len();
        let pod = state.store.objects.get(&asked.key).filter(|pod| super::uid(pod) == of.0);
        let status = pod.and_then(|pod| super::container_status(pod, &container));
        let is_running = status.is_some_and(|status| status["state"]["terminated"].is_null());
        match text.is_empty() {
            _ if !follows || !is_running => Next::Last(text),
            false => Next::Say(text),
            true => Next::Wait,
        }
    });
    Ok(stamped(shared, 200, "text/plain", body))
}

async fn cut() -> io::Error {
    // So that what comes before is sent.
    tokio::task::yield_now().await;
    io::ErrorKind::ConnectionReset.into()
}

fn failure(shared: &Shared, Refused(code, status): &Refused) -> Response<Body> {
    success(shared, *code, status)
}

fn success(shared: &Shared, code: u16, body: &Value) -> Response<Body> {
    stamped(shared, code, "application/json", Body::from(body.to_string()))
}

fn stamped(shared: &Shared, code: u16, kind: &str, body: Body) -> Response<Body> {
    let date = shared.state.lock().store.now().strftime("%a, %d %b %Y %H:%M:%S GMT").to_string();
    let response = Response::builder().status(code).header(header::CONTENT_TYPE, kind).header(header::DATE, date);
    response.body(body).expect("an answer")
}
