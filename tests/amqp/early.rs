//! The broker's patience: what is known of it, and requests that outlast it.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use journeyman::amqp::lapin::BasicProperties;
use journeyman::amqp::lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use journeyman::amqp::lapin::types::{AMQPValue, FieldTable};
use journeyman::amqp::management::{Management, ManagementError};
use journeyman::amqp::{self, Broker as Address, headers};
use journeyman::domain::consumer_timeout::QueueTimeout;
use journeyman::handler::ExecuteError;
use journeyman::source::Reply;
use journeyman::source::amqp::{AmqpSourceConfig as Queue, Early};
use journeyman::worker::ExitReason;
use rustix::process::Signal;

use crate::broker::{Broker, management};
use crate::gremlin::{self, Gremlin};
use crate::process::{Process, command, config};
use crate::support::{Act, Client, Gate, Kind, Running, broker, echo, next, queue, shared, shared_uri, within};
use crate::wire::Wire;

/// A patience for tests, half of which is over soon.
const PATIENCE: Duration = Duration::from_secs(20);

/// The rules of a queue whose broker waits so long, and whose requests may be acknowledged early.
fn early(client: &Client, folder: &Path, early: Early) -> Queue {
    let mut settings = queue(client);
    settings.consumer_timeout = Some(PATIENCE);
    settings.early = early;
    settings.shelf = Some(folder.join("requests"));
    settings
}

/// A folder in memory where there is one: how slow the disk is while others build is not what is tested.
pub(crate) fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a folder")
}

fn on_the_shelf(folder: &Path) -> usize {
    std::fs::read_dir(folder.join("requests")).map_or(0, Iterator::count)
}

async fn is_off_the_disk(folder: &Path) {
    within("nothing is left on the disk", async {
        while on_the_shelf(folder) > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Waits until a broker's patience is over with a message that it delivers from now on.
async fn patience_is_over(at: &Address) {
    let witness = Client::new(at, Kind::Durable).await;
    assert!(witness.publish(BasicProperties::default(), b"never acknowledged").await);
    let options = BasicConsumeOptions::default();
    let name = witness.queue.as_str().into();
    let consumer = witness.channel.basic_consume(name, "".into(), options, FieldTable::default()).await;
    let mut consumer = consumer.expect("it is consumed from");
    within("a delivery", next(&mut consumer)).await.expect("a delivery");
    within("the end of the broker's patience", async {
        while witness.channel.status().connected() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_acknowledged_early_outlasts_the_brokers_patience_and_is_answered_once() {
    if shared().is_none() {
        return;
    }
    let own = tokio::task::spawn_blocking(|| {
        let own = Broker::start("");
        own.ctl(&["eval", "[application:set_env(rabbit, K, V) || {K, V} <- [{consumer_timeout, 20000}, {channel_tick_interval, 1000}]]."]);
        own
    })
    .await
    .expect("it starts");
    let at = broker(&own.uri());
    for kind in [Kind::Durable, Kind::Quorum] {
        let (client, folder) = (Client::new(&at, kind).await, folder());
        let (mut gate, act) = Gate::handler();
        let worker = Running::start(early(&client, folder.path(), Early::RunAgain), 2, act);
        assert!(client.publish(Client::properties("long", "/long"), b"long").await);
        assert_eq!(gate.enters().await, "long");
        patience_is_over(&at).await;
        assert_eq!((worker.tally("shelved").await, on_the_shelf(folder.path())), (1, 1));
        // The other slot takes requests meanwhile, and one that is quick is never on the disk.
        gate.go.add_permits(1);
        assert_eq!(client.answer("long").await.body, b"long");
        gate.go.add_permits(1);
        assert_eq!(client.call("/quick", b"quick").await.body, b"quick");
        client.until_depth(0, 1).await;
        worker.completed(2).await;
        assert_eq!(worker.control.counts().lost, 0, "{kind:?}");
        assert_eq!((worker.tally("connections").await, worker.tally("shelved").await), (1, 1));
        worker.drained().await;
        client.until_depth(0, 0).await;
        assert_eq!(on_the_shelf(folder.path()), 0);
    }
    drop(own);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_acknowledged_early_outlives_its_connection() {
    let (Some(direct), Some(uri)) = (shared(), shared_uri()) else { return };
    let (client, folder) = (Client::new(&direct, Kind::Durable).await, folder());
    let wire = Wire::to(uri.split_once('@').expect("a user").1.split_once('/').expect("a path").0).await;
    let (mut gate, act) = Gate::handler();
    let mut settings = early(&client, folder.path(), Early::RunAgain);
    settings.broker = broker(&wire.uri(&uri));
    let worker = Running::start(settings, 1, act);
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    assert_eq!(gate.enters().await, "a");
    worker.counts("shelved", 1).await;
    wire.cut();
    gate.go.add_permits(1);
    assert_eq!(client.answer("a").await.body, b"a");
    worker.completed(1).await;
    assert_eq!(worker.control.counts().lost, 0);
    assert_eq!((worker.tally("answers").await, on_the_shelf(folder.path())), (1, 0));
    worker.drained().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_acknowledged_early_and_handed_back_is_in_its_queue_again_and_nowhere_else() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    let (mut gate, act) = Gate::handler();
    let first = Running::start(early(&client, folder.path(), Early::RunAgain), 1, act);
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    assert_eq!(gate.enters().await, "a");
    first.counts("shelved", 1).await;
    first.control.release(None).await;
    assert_eq!(first.ended().await, ExitReason::Released);
    client.until_depth(1, 0).await;
    assert_eq!(on_the_shelf(folder.path()), 0);
    // Whoever is next has it whole, and nothing counts against it.
    let copy = client.get(&client.queue).await.expect("it is there");
    let table = copy.properties.headers().clone().expect("headers");
    assert_eq!(headers::number(&table, "x-journeyman-attempts"), Some(0));
    assert_eq!(headers::text(&table, "x-rpc-path"), Some("/a"));
    assert!(client.publish(copy.properties.clone(), &copy.data).await);
    let second = Running::start(queue(&client), 1, echo());
    assert_eq!(client.answer("a").await.status(), "ok");
    second.drained().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_on_the_disk_whose_full_queue_does_not_take_it_back_makes_room_for_others_first() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    client.delete_queue().await;
    client.declare_narrow(&client.queue).await;
    let (mut gate, gated) = Gate::handler();
    let tried = std::sync::atomic::AtomicBool::new(false);
    let act: Act = Arc::new(move |request, context| {
        if !tried.swap(true, std::sync::atomic::Ordering::Relaxed) {
            let waiting = gated(request, context);
            return Box::pin(async move {
                waiting.await?;
                Err(ExecuteError::Intermittent("not yet".to_owned()))
            });
        }
        Box::pin(async move {
            context.set_reply(Reply::ok(*b"at last")).expect("it fits");
            Ok(())
        })
    });
    // It was not interrupted, whatever becomes of what is.
    let mut settings = early(&client, folder.path(), Early::Answer);
    settings.reply_retry_max = Duration::from_secs(1);
    let worker = Running::start(settings, 1, act);
    assert!(client.publish(Client::properties("first", "/a"), b"first").await);
    assert_eq!(gate.enters().await, "first");
    worker.counts("shelved", 1).await;
    assert!(client.publish(Client::properties("second", "/a"), b"1").await);
    // The worker is handed it, has no slot for it, and gives it back: the queue is full, and stays so.
    client.until_depth(1, 0).await;
    gate.go.add_permits(1);
    for id in ["second", "first"] {
        assert_eq!(client.answer(id).await.body, b"at last", "{id}");
    }
    is_off_the_disk(folder.path()).await;
    worker.drained().await;
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_on_the_disk_for_room_in_its_queue_is_known_by_the_next_life_as_handed_back() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    client.delete_queue().await;
    client.declare_narrow(&client.queue).await;
    let (mut gate, gated) = Gate::handler();
    let act: Act = Arc::new(move |request, context| {
        let waiting = gated(request, context);
        Box::pin(async move {
            waiting.await?;
            Err(ExecuteError::Intermittent("not yet".to_owned()))
        })
    });
    let mut settings = early(&client, folder.path(), Early::Answer);
    settings.reply_retry_max = Duration::from_secs(1);
    let first = Running::start(settings, 1, act);
    let patient = Client::properties("first", "/a").with_expiration("600000".into());
    assert!(client.publish(patient, b"first").await);
    assert_eq!(gate.enters().await, "first");
    first.counts("shelved", 1).await;
    first.control.drain().await;
    client.until_depth(0, 0).await;
    assert!(client.publish(Client::properties("second", "/a"), b"1").await);
    gate.go.add_permits(1);
    assert_eq!(first.ended().await, ExitReason::Drained);
    // By a worker that would answer what was interrupted.
    let second = Running::start(early(&client, folder.path(), Early::Answer), 1, echo());
    for id in ["second", "first"] {
        assert_eq!(client.answer(id).await.status(), "ok", "{id}");
    }
    is_off_the_disk(folder.path()).await;
    second.drained().await;
    client.delete_queue().await;
}

/// Starts workers that end at once after they have acknowledged, until the request is given up.
async fn tries(client: &Client, folder: &Path) -> usize {
    let mut tries = 0;
    loop {
        let (mut gate, act) = Gate::handler();
        let mut settings = early(client, folder, Early::RunAgain);
        settings.max_attempts = std::num::NonZeroU32::new(2);
        let worker = Running::start(settings, 1, act);
        tokio::select! {
            _ = gate.enters() => {
                tries += 1;
                worker.counts("shelved", 1).await;
                worker.control.abort().await;
                assert_eq!(worker.ended().await, ExitReason::Aborted);
            }
            () = worker.counts("exhausted", 1) => {
                worker.drained().await;
                return tries;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_short_after_an_early_acknowledgement_is_run_again_and_given_up_in_the_end() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    assert_eq!(tries(&client, folder.path()).await, 2);
    let answer = client.answer("a").await;
    assert_eq!((answer.status(), &answer.json()["type"]), ("core_error", &"journeyman:attempts_exhausted".into()));
    client.until_depth(0, 0).await;
    assert_eq!(on_the_shelf(folder.path()), 0);
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_short_after_an_early_acknowledgement_is_answered_so_where_that_is_wanted() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    let (mut gate, act) = Gate::handler();
    let first = Running::start(early(&client, folder.path(), Early::Answer), 1, act);
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    gate.enters().await;
    first.counts("shelved", 1).await;
    first.control.abort().await;
    assert_eq!(first.ended().await, ExitReason::Aborted);
    let (mut gate, act) = Gate::handler();
    let second = Running::start(early(&client, folder.path(), Early::Answer), 1, act);
    let answer = client.answer("a").await;
    assert_eq!((answer.status(), &answer.json()["type"]), ("core_error", &"journeyman:interrupted".into()));
    assert_eq!(answer.json()["context"]["attempts"], 1);
    is_off_the_disk(folder.path()).await;
    second.drained().await;
    assert!(gate.entered.try_recv().is_err(), "it did not run again");
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}

/// A payload that takes as long as it is let.
const WAITS: &str = "#!/bin/sh\ncat >/dev/null\nexec sleep 600\n";

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_cannot_be_written_down_is_not_acknowledged_early_and_somebody_is_told() {
    let (Some(at), Some(uri)) = (shared(), shared_uri()) else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    let more = "[source.requests]\nkind = \"amqp\"\nhandler = \"echo\"\nearly_acknowledge = \"run-again\"\n\
                [amqp]\nconsumer_timeout = \"10s\"\n";
    let config = config(folder.path(), WAITS, more);
    let variables = [("WORKER_REQUESTS_QUEUE", client.queue.as_str()), ("WORKER_KEY", "1"), ("WORKER_AMQP_URI", &uri)];
    // No file may grow beyond 200 blocks of 512 bytes, as on a disk that is full.
    let program = command(folder.path(), &config, &variables);
    let mut narrow = Command::new("sh");
    narrow.args(["-c", "trap '' XFSZ; ulimit -f 200; exec \"$0\" \"$@\""]).arg(program.get_program());
    narrow.args(program.get_args()).current_dir(folder.path()).env_clear();
    narrow.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    narrow.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut worker = Process::of(narrow);
    assert!(client.publish(Client::properties("a", "/a"), &[b'x'; 300_000]).await);
    worker.says("a request cannot be put on this host's disk").await;
    // It is ended before the broker's patience is, goes back, and comes again.
    worker.says("claim lost").await;
    worker.signal(Signal::QUIT);
    let ended = worker.ends().await;
    assert!(ended.status.code().is_some(), "{}", ended.log);
    client.until_depth(1, 0).await;
    let left = std::fs::read_dir(folder.path().join("work/requests-requests")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "half a request is no use");
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_heeds_no_time_of_a_queue_is_not_believed() {
    let Some(at) = shared() else { return };
    let base = management();
    let client = Client::new(&at, Kind::Transient).await;
    let named = format!("{}-named", client.queue);
    let arguments = amqp::header_table([("x-consumer-timeout", AMQPValue::LongInt(1000))]);
    let options = QueueDeclareOptions::default();
    client.channel.queue_declare(named.as_str().into(), options, arguments).await.expect("it is declared");
    let management = Management::new(&at, &base, None).expect("it can be asked");
    let told = management.describe_queue(&named).await.expect("it tells");
    println!("{told:?} says {:?}", told.timeout());
    assert_eq!(told.argument, Some(Duration::from_secs(1)));
    // RabbitMQ 3.10 accepts the argument and heeds its own setting, which it tells nobody.
    let heeds = told.version >= journeyman::domain::consumer_timeout::BrokerVersion { major: 3, minor: 12 };
    assert_eq!(
        told.timeout(),
        if heeds { QueueTimeout::Limited(Duration::from_secs(1)) } else { QueueTimeout::BrokerDefault }
    );
    assert!(matches!(management.describe_queue("nowhere").await, Err(ManagementError::NotFound)));
    let stranger = broker("amqp://guest:hunter2@127.0.0.1/");
    let refused = Management::new(&stranger, &base, None).expect("it can be asked").describe_queue(&named).await;
    let why = refused.expect_err("it is refused").to_string();
    for part in ["401", "`amqp.management`", "the tag `management`"] {
        assert!(why.contains(part), "{why}");
    }
    assert!(!why.contains("hunter2"), "{why}");
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_tells_of_a_queues_patience_counts_before_what_is_configured() {
    let Some(at) = shared() else { return };
    let client = Client::new(&at, Kind::Durable).await;
    // As a later RabbitMQ answers.
    let later = Gremlin::start(|_| {
        vec![
            gremlin::json(200, &serde_json::json!({ "rabbitmq_version": "3.13.7" })),
            gremlin::json(
                200,
                &serde_json::json!({
                    "type": "classic", "arguments": {}, "effective_policy_definition": { "consumer-timeout": 16000 },
                }),
            ),
        ]
    })
    .await;
    let (mut gate, act) = Gate::handler();
    let mut settings = queue(&client);
    settings.management = Some(Management::new(&at, &later.url(), None).expect("it can be asked"));
    settings.max_attempts = std::num::NonZeroU32::new(1);
    let worker = Running::start(settings, 1, act);
    assert!(client.publish(Client::properties("long", "/long"), b"long").await);
    assert_eq!(gate.enters().await, "long");
    // Ended in seconds, and not in the half hour that is configured.
    assert_eq!(client.answer("long").await.json()["type"], "journeyman:attempts_exhausted");
    let asked = later.asked();
    assert!(asked[1].line.contains(&format!("/api/queues/%2F/{}", client.queue)), "{}", asked[1].line);
    worker.drained().await;
    client.delete_queue().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_asks_for_partial_answers_gets_them_after_an_early_acknowledgement_as_well() {
    let Some(at) = shared() else { return };
    let (client, folder) = (Client::new(&at, Kind::Durable).await, folder());
    let shelved = Arc::new(tokio::sync::Semaphore::new(0));
    let waits = Arc::clone(&shelved);
    let act: Act = Arc::new(move |_, context| {
        let waits = Arc::clone(&waits);
        Box::pin(async move {
            waits.acquire().await.expect("the test lets it").forget();
            context.send_partial_reply(Reply::ok(*b"part")).await.expect("somebody waits");
            context.set_reply(Reply::ok(*b"last")).expect("it fits");
            Ok(())
        })
    });
    let worker = Running::start(early(&client, folder.path(), Early::RunAgain), 1, act);
    assert!(client.publish(Client::properties("a", "/a"), b"a").await);
    worker.counts("shelved", 1).await;
    shelved.add_permits(1);
    let part = client.answer("a").await;
    assert_eq!((part.partial, part.body.as_slice()), (true, &b"part"[..]));
    let last = client.answer("a").await;
    assert_eq!((last.partial, last.body.as_slice()), (false, &b"last"[..]));
    worker.drained().await;
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}
