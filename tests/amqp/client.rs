//! `journeyman call`, and the client library, with a worker that the test plays.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use journeyman::client::{RpcClient, RpcError, RpcReply, RpcRequest};
use journeyman_platform::amqp;
use lapin::message::Delivery;
use lapin::options::{BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, Consumer, ExchangeKind};
use tokio::task::JoinSet;

use crate::amqp::support::{TEST_TIMEOUT, broker, consume, header, next, shared, shared_uri, within};
use crate::support::broker::Broker;

/// A pool with one worker group without workers.
struct Pool {
    _connection: Connection,
    channel: Channel,
    exchange: String,
    queue: String,
}

impl Pool {
    async fn new(broker: &amqp::Broker, arguments: FieldTable) -> Self {
        let connection = broker.connect("a pool").await.expect("a connection");
        let channel = connection.create_channel().await.expect("a channel");
        let exchange = format!("{}-req-xchg", uuid::Uuid::new_v4());
        let options = ExchangeDeclareOptions { auto_delete: true, ..ExchangeDeclareOptions::default() };
        channel
            .exchange_declare(exchange.as_str().into(), ExchangeKind::Direct, options, FieldTable::default())
            .await
            .expect("an exchange");
        let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
        let queue = channel.queue_declare("".into(), options, arguments).await.expect("a queue").name().to_string();
        let (from, name) = (exchange.as_str().into(), queue.as_str().into());
        channel
            .queue_bind(name, from, "42".into(), QueueBindOptions::default(), FieldTable::default())
            .await
            .expect("a binding");
        Self { _connection: connection, channel, exchange, queue }
    }

    /// A pool on the shared broker, a client, and the consumer of the group's worker.
    async fn shared() -> Option<(Self, RpcClient, Consumer)> {
        let broker = shared()?;
        let pool = Self::new(&broker, FieldTable::default()).await;
        let worker = pool.worker().await;
        Some((pool, RpcClient::new(broker, "a test"), worker))
    }

    fn call(&self, body: &str) -> RpcRequest {
        RpcRequest {
            exchange: self.exchange.clone(),
            routing_key: "42".to_owned(),
            path: Some("/echo".to_owned()),
            body: body.as_bytes().to_vec(),
            timeout: TEST_TIMEOUT,
            ..RpcRequest::default()
        }
    }

    async fn worker(&self) -> Consumer {
        consume(&self.channel, &self.queue).await
    }

    /// The ready messages and the consumers of a queue.
    async fn depth(&self, queue: &ShortString) -> (u32, u32) {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.clone(), options, FieldTable::default()).await.expect("a queue");
        (queue.message_count(), queue.consumer_count())
    }

    async fn reply(&self, request: &Delivery, body: &[u8], status: &str, partial: Option<bool>) {
        let to = request.properties.reply_to().as_ref().expect("the client waits").clone();
        let id = request.properties.correlation_id().as_ref().expect("it has an id").clone();
        let partial = partial.map(|partial| ("x-non-terminating-response", AMQPValue::Boolean(partial)));
        let table = amqp::header_table([("x-status", bytes(status))].into_iter().chain(partial));
        let properties = BasicProperties::default().with_correlation_id(id).with_headers(table);
        let options = BasicPublishOptions::default();
        self.channel.basic_publish("".into(), to, options, body, properties).await.expect("it is published");
    }

    /// Sends a request, and replies to it in place of the worker.
    async fn call_and_reply(
        &self,
        client: &RpcClient,
        worker: &mut Consumer,
        body: &str,
    ) -> (Result<RpcReply, RpcError>, Delivery) {
        let call = self.call(body);
        let replying = async {
            let request = next(worker).await.expect("a request");
            self.reply(&request, &request.data, "ok", None).await;
            request
        };
        within("a reply", Box::pin(async { tokio::join!(client.call(&call), replying) })).await
    }
}

fn bytes(text: &str) -> AMQPValue {
    AMQPValue::ByteArray(text.as_bytes().to_vec().into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replies_reach_their_calls_in_any_order() {
    const CALLS: usize = 2_000;
    let Some((pool, client, mut worker)) = Pool::shared().await else { return };
    let (client, mut calls) = (Arc::new(client), JoinSet::new());
    for n in 0..CALLS {
        let (client, call) = (Arc::clone(&client), pool.call(&n.to_string()));
        calls.spawn(async move { (n, client.call(&call).await) });
    }
    let mut requests = Vec::new();
    while requests.len() < CALLS {
        requests.push(within("a request", next(&mut worker)).await.expect("a request"));
    }
    for request in requests.iter().rev() {
        pool.reply(request, &request.data, "ok", None).await;
    }
    let mut answered = BTreeSet::new();
    while let Some(joined) = within("an answer", calls.join_next()).await {
        let (n, answer) = joined.expect("no panic");
        let answer = answer.expect("an answer");
        assert_eq!((answer.body, answer.status.as_deref()), (n.to_string().into_bytes(), Some("ok")));
        answered.insert(n);
    }
    assert_eq!(answered.len(), CALLS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_equals_the_one_of_the_recorded_client_and_expires_with_its_call() {
    let Some((pool, client, mut worker)) = Pool::shared().await else { return };
    let (answer, request) = pool.call_and_reply(&client, &mut worker, "{\"x\":1}").await;
    assert!(answer.expect("an answer").is_ok());
    let properties = &request.properties;
    assert_eq!(request.data, b"{\"x\":1}");
    assert_eq!(request.routing_key.as_str(), "42");
    assert_eq!(properties.expiration().as_ref().map(|text| text.as_str()), Some("60000"));
    let table = properties.headers().as_ref().expect("headers");
    assert_eq!(table.inner().get("x-rpc-path"), Some(&bytes("/echo")));
    assert!(uuid::Uuid::parse_str(properties.correlation_id().as_ref().expect("an id").as_str()).is_ok());
    assert!(properties.reply_to().as_ref().expect("an address").as_str().starts_with("amq.rabbitmq.reply-to."));
    assert_eq!((properties.delivery_mode(), properties.content_type()), (&None, &None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn b16_an_unroutable_request_fails_at_once_and_no_other_does() {
    const EACH: usize = 300;
    let Some((pool, client, mut worker)) = Pool::shared().await else { return };
    let client = Arc::new(client);
    let missing = RpcRequest { exchange: "no-such-xchg".to_owned(), ..pool.call("") };
    let error = within("no pool", client.call(&missing)).await.expect_err("there is no such pool");
    assert_eq!(error, RpcError::ExchangeNotFound("no-such-xchg".to_owned()));
    let mut calls = JoinSet::new();
    for n in 0..2 * EACH {
        let key = if n % 2 == 0 { "42" } else { "7" }.to_owned();
        let (client, call) = (Arc::clone(&client), RpcRequest { routing_key: key, ..pool.call(&n.to_string()) });
        calls.spawn(async move { (n, client.call(&call).await) });
    }
    let mut refused = 0;
    while refused < EACH {
        let (n, answer) = within("a refusal", calls.join_next()).await.expect("a call").expect("no panic");
        assert!(n % 2 == 1, "call {n} is for a group that is there: {answer:?}");
        assert_eq!(answer, Err(RpcError::Unroutable { exchange: pool.exchange.clone(), key: "7".to_owned() }));
        refused += 1;
    }
    for _ in 0..EACH {
        let request = within("a request", next(&mut worker)).await.expect("a request");
        pool.reply(&request, b"", "ok", None).await;
    }
    while let Some(joined) = within("an answer", calls.join_next()).await {
        assert!(joined.expect("no panic").1.is_ok());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_broker_refuses_fails() {
    let Some(broker) = shared() else { return };
    let full =
        [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    let pool = Pool::new(&broker, amqp::header_table(full)).await;
    let client = RpcClient::new(broker, "a test");
    within("the first", client.send(&pool.call("1"))).await.expect("there is room for one");
    assert_eq!(within("the second", client.send(&pool.call("2"))).await, Err(RpcError::Nacked));
    assert_eq!(within("the third", client.call(&pool.call("3"))).await, Err(RpcError::Nacked));
    let elsewhere = RpcRequest { routing_key: "7".to_owned(), ..pool.call("4") };
    assert!(matches!(within("the fourth", client.send(&elsewhere)).await, Err(RpcError::Unroutable { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_without_a_reply_times_out_and_a_late_reply_is_dropped() {
    let Some((pool, client, mut worker)) = Pool::shared().await else { return };
    // Connecting would count against the timeout.
    within("the first", client.send(&pool.call("first"))).await.expect("it is taken");
    let first = within("a request", next(&mut worker)).await.expect("a request").properties;
    assert_eq!(
        (first.expiration().as_ref(), *first.delivery_mode()),
        (None, Some(2)),
        "a detached request does not expire"
    );
    // The broker drops the request after its timeout.
    let short = RpcRequest { timeout: Duration::from_secs(5), ..pool.call("short") };
    let (answer, late) =
        within("the end of its time", Box::pin(async { tokio::join!(client.call(&short), next(&mut worker)) })).await;
    assert_eq!(answer, Err(RpcError::TimedOut(short.timeout)));
    let late = late.expect("a request");
    assert_eq!(late.properties.expiration().as_ref().map(ShortString::as_str), Some("5000"));
    pool.reply(&late, b"late", "ok", None).await;
    let (answer, _) = pool.call_and_reply(&client, &mut worker, "on time").await;
    assert_eq!(answer.expect("an answer").body, b"on time");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pending_calls_fail_with_the_connection_and_the_next_call_reconnects() {
    let Some(mut own) = Broker::own() else { return };
    let reached = broker(&own.uri());
    let pool = Pool::new(&reached, FieldTable::default()).await;
    let client = RpcClient::new(reached.clone(), "a test");
    let mut worker = pool.worker().await;
    let call = pool.call("");
    let killing = async {
        next(&mut worker).await.expect("a request");
        tokio::task::block_in_place(|| own.kill());
    };
    let (answer, ()) = within("the loss", Box::pin(async { tokio::join!(client.call(&call), killing) })).await;
    assert_eq!(answer, Err(RpcError::ConnectionLost));
    assert!(matches!(within("a refusal", client.call(&call)).await, Err(RpcError::Unreachable(_))));
    tokio::task::block_in_place(|| own.up());
    let pool = Pool::new(&reached, FieldTable::default()).await;
    let mut worker = pool.worker().await;
    let (answer, _) = pool.call_and_reply(&client, &mut worker, "again").await;
    assert_eq!(answer.expect("an answer").body, b"again");
}

/// Calls once, and drops the call after its request was sent and noted. Returns that request, and the queue of the note.
async fn send_once(pool: &Pool, worker: &mut Consumer, call: &RpcRequest, id: &str) -> (Delivery, ShortString) {
    // The note follows the request. A call that is dropped in between is sent again, with another queue: its note may come late.
    for round_trips in 1.. {
        let reply_queue = &ShortString::from(format!("{}-{id}-{round_trips}", pool.exchange));
        let client = RpcClient::new(shared().expect("a broker"), "a test");
        let receiving = async {
            let request = within("a request", next(worker)).await.expect("a request");
            for _ in 0..round_trips {
                pool.depth(reply_queue).await;
            }
            request
        };
        let request = tokio::select! {
            ended = client.call_once(call, reply_queue.as_str()) => panic!("it was not answered: {ended:?}"),
            request = receiving => request,
        };
        drop(client);
        let mut depth = pool.depth(reply_queue).await;
        // It returns what it has received after its consumer has ended, all at once.
        while depth.0 == 0 || depth.1 > 0 {
            depth = pool.depth(reply_queue).await;
        }
        // The call has left its probe and its note.
        if depth.0 == 2 {
            return (request, reply_queue.clone());
        }
    }
    unreachable!("the range has no end")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c7_a_client_finds_what_an_earlier_client_of_its_reply_queue_has_sent() {
    let Some((pool, later, mut worker)) = Pool::shared().await else { return };
    let (pending, answered) = (pool.call("pending"), pool.call("answered"));
    let (of_pending, pending_queue) = send_once(&pool, &mut worker, &pending, "pending").await;
    let (of_answered, answered_queue) = send_once(&pool, &mut worker, &answered, "answered").await;
    pool.reply(&of_answered, b"answered", "ok", None).await;
    let call_once = async |call, queue| within("a reply", later.call_once(call, queue)).await.expect("a reply").body;
    assert_eq!(call_once(&answered, answered_queue.as_str()).await, b"answered");
    let replying = async {
        while pool.depth(&pending_queue).await.1 == 0 {}
        pool.reply(&of_pending, b"partial", "ok", Some(true)).await;
        pool.reply(&of_pending, b"pending", "ok", None).await;
    };
    let (body, ()) = tokio::join!(call_once(&pending, pending_queue.as_str()), replying);
    assert_eq!(body, b"pending");
    // Neither was sent again. A call that has ended is.
    let replying = async {
        let request = next(&mut worker).await.expect("a request");
        assert_eq!(request.data, b"answered");
        pool.reply(&request, b"once more", "ok", None).await;
    };
    let (body, ()) = tokio::join!(call_once(&answered, answered_queue.as_str()), replying);
    assert_eq!(body, b"once more");
}

/// The output and exit code of `journeyman call`, with a worker that replies with this status and body.
async fn call_with_worker(
    pool: &Pool,
    uri: &str,
    arguments: &[&str],
    status: &str,
    body: &[u8],
) -> (i32, String, String) {
    let mut worker = pool.worker().await;
    let arguments = [&["--exchange", &pool.exchange, "--key", "42"], arguments].concat();
    let working = async {
        while let Some(request) = next(&mut worker).await {
            if request.properties.reply_to().is_some() {
                pool.reply(&request, body, status, None).await;
            }
        }
    };
    tokio::select! {
        output = call(uri, &arguments) => output,
        () = working => panic!("the worker's consumer ended"),
    }
}

async fn call(uri: &str, arguments: &[&str]) -> (i32, String, String) {
    let running = tokio::process::Command::new(env!("CARGO_BIN_EXE_journeyman"))
        .arg("call")
        .args(arguments)
        .env_clear()
        .env("JOURNEYMAN_AMQP_URI", uri)
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = within("the end of the command", running).await.expect("it can be run");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_uses_pool_path_and_timeout_and_prints_partial_replies_on_demand() {
    let (Some(uri), Some((pool, _, mut worker))) = (shared_uri(), Pool::shared().await) else { return };
    let name = pool.exchange.strip_suffix("-req-xchg").expect("it is called after its pool");
    for (more, printed) in [(&["--stream"][..], "1\n2\n"), (&[][..], "2\n")] {
        let working = async {
            let request = within("a request", next(&mut worker)).await.expect("a request");
            pool.reply(&request, b"1", "ok", Some(true)).await;
            pool.reply(&request, b"2", "ok", Some(false)).await;
            request
        };
        let arguments =
            [&["--pool", name, "--key", "42", "--path", "/echo", "--timeout", "1m", "\"hello\""], more].concat();
        let (output, request) = Box::pin(async { tokio::join!(call(&uri, &arguments), working) }).await;
        assert_eq!(output, (0, printed.to_owned(), String::new()));
        let header = header(&request, "x-rpc-path");
        assert_eq!((header.as_deref(), &*request.data), (Some("/echo"), &b"\"hello\""[..]));
        assert_eq!(request.properties.expiration().as_ref().map(|time| time.as_str()), Some("60000"));
    }
    for (arguments, words) in [
        (["--pool", name, "--key", "42", "--timeout", "1s"], "1s"),
        (["--pool", "no-such", "--key", "42", "--timeout", "1m"], "no-such-req-xchg"),
        (["--pool", name, "--key", "7", "--timeout", "1m"], "`7`"),
    ] {
        let (code, out, err) = call(&uri, &arguments).await;
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(err.contains(words), "{err}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c3_the_command_prints_why_a_request_expired() {
    let (Some(broker), Some(uri)) = (shared(), shared_uri()) else { return };
    let dead = format!("{}-dead", uuid::Uuid::new_v4().simple());
    let text = |text: &str| AMQPValue::LongString(text.into());
    let dead_letters = [("x-dead-letter-exchange", text("")), ("x-dead-letter-routing-key", text(&dead))];
    let pool = Pool::new(&broker, amqp::header_table(dead_letters)).await;
    let options = QueueDeclareOptions { exclusive: true, ..QueueDeclareOptions::default() };
    pool.channel.queue_declare(dead.as_str().into(), options, FieldTable::default()).await.expect("a queue");
    let mut expired = consume(&pool.channel, &dead).await;
    // A controller does the same.
    let replying = async {
        let request = within("an expired request", next(&mut expired)).await.expect("a request");
        pool.reply(&request, b"{\"context\":{\"reason\":\"expired\"}}", "core_error", None).await;
    };
    let arguments = ["--exchange", &pool.exchange, "--key", "42", "--timeout", "1s"];
    let ((code, out, err), ()) = Box::pin(async { tokio::join!(call(&uri, &arguments), replying) }).await;
    assert_eq!((code, out.as_str()), (1, "{\"context\":{\"reason\":\"expired\"}}\n"), "{err}");
    assert!(err.contains("core_error"), "{err}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_prints_the_reply_and_reports_an_error_status() {
    let (Some(broker), Some(uri)) = (shared(), shared_uri()) else { return };
    for (arguments, status, body, code, printed) in [
        (&["{\"x\":1}"][..], "ok", "{\"echo\":1}", 0, "{\"echo\":1}\n"),
        (&[], "core_error", "{\"type\":\"dead_letter\"}", 1, "{\"type\":\"dead_letter\"}\n"),
        (&["--detach", "--", "-1"], "ok", "", 0, ""),
    ] {
        let pool = Pool::new(&broker, FieldTable::default()).await;
        let (ended, out, err) = call_with_worker(&pool, &uri, arguments, status, body.as_bytes()).await;
        assert_eq!((ended, out.as_str()), (code, printed), "{err}");
        assert_eq!(err.contains("core_error"), code != 0, "{err}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_uses_client_certificates_and_verifies_the_broker() {
    let Some(own) = Broker::own() else { return };
    let pool = Pool::new(&broker(&own.uri()), FieldTable::default()).await;
    let set = |key: &str, name: &str| format!("amqp.{key}={}", own.tls().join(name).display());
    let (ca, certificate) = (set("ca_file", "ca.pem"), set("certificate_file", "client.pem"));
    let key = set("key_file", "client.key");
    let all = ["--set", &ca, "--set", &certificate, "--set", &key];
    let output = call_with_worker(&pool, &own.tls_uri(), &all, "ok", b"{\"echo\":1}").await;
    assert_eq!(output, (0, "{\"echo\":1}\n".to_owned(), String::new()));
    // No CA for the broker, no client certificate, and half of a client certificate.
    for (arguments, code) in [(&all[2..], 32), (&all[..2], 32), (&all[..4], 30)] {
        let (ended, out, err) = call_with_worker(&pool, &own.tls_uri(), arguments, "ok", b"1").await;
        assert_eq!((ended, out.as_str()), (code, ""), "{arguments:?}: {err}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_broker_is_reported_as_unreachable() {
    let silent = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = silent.local_addr().expect("it has one");
    let client = RpcClient::new(broker(&format!("amqp://guest:guest@{address}/")), "a test");
    let call = RpcRequest { timeout: Duration::from_millis(300), routing_key: "k".to_owned(), ..RpcRequest::default() };
    let (called, sent) = tokio::join!(client.call(&call), client.send(&call));
    for error in [called.map(|_| ()), sent].map(|output| output.expect_err("there is no answer")) {
        let RpcError::Unreachable(what) = &error else { panic!("{error:?}") };
        assert!(what.contains("did not respond within 300ms") && what.contains("was not sent"), "{what}");
    }
}
