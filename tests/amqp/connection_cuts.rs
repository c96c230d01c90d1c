//! A connection that fails repeatedly while requests are processed: none may be lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use journeyman::source::amqp::AmqpSourceConfig as Queue;
use journeyman::task::Reply;
use tokio::sync::watch;

use crate::faults::persistent;
use crate::support::{Act, Client, Kind, Running, Taken, broker, queue, shared, shared_uri, target};
use crate::wire::{Way, Wire};

/// In turn. Heartbeats find the silent ones.
const FAULTS: [Fault; 4] =
    [Fault::Slow(Duration::from_millis(5)), Fault::For(Way::Stall), Fault::Reset, Fault::For(Way::HalfOpen)];

/// Pending requests at most: more than the worker takes, and so few that each fault meets some.
const AHEAD: u64 = 200;

/// Marks the end of the replies.
const END: &str = "end";

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Delays each chunk by this, until the next fault.
    Slow(Duration),
    /// Lasts for the rest of the connection.
    For(Way),
    Reset,
}

/// The number of messages, by `JOURNEYMAN_TEST_AMQP_MESSAGES`.
fn messages() -> u64 {
    std::env::var("JOURNEYMAN_TEST_AMQP_MESSAGES").ok().and_then(|text| text.parse().ok()).unwrap_or(3_000)
}

/// Replies by correlation id.
#[derive(Default)]
struct Answers {
    came: Mutex<BTreeMap<String, u64>>,
    different: watch::Sender<u64>,
}

impl Answers {
    /// Takes the next reply, unless it marks the end.
    async fn take(&self, taken: &mut Taken) -> bool {
        let answer = taken.next().await;
        let id = answer.properties.correlation_id().as_ref().expect("an id").to_string();
        assert_eq!(answer.data, id.as_bytes());
        if id == END {
            return false;
        }
        let mut came = self.came.lock().expect("unpoisoned");
        *came.entry(id).or_insert(0) += 1;
        self.different.send_replace(came.len() as u64);
        true
    }

    async fn until(&self, count: u64) {
        self.different.subscribe().wait_for(|different| *different >= count).await.expect("it stays");
    }
}

/// One fault after the other, each in the middle of its share of the work.
async fn go_wrong(wire: &Wire, answers: &Answers, all: u64, faults: u64) {
    for (number, fault) in (0..faults).zip(FAULTS.iter().cycle()) {
        answers.until(all * (2 * number + 1) / (2 * faults)).await;
        wire.set(Way::Carry);
        match fault {
            Fault::Slow(span) => wire.set(Way::Delay(*span)),
            Fault::For(way) => wire.strand(*way),
            Fault::Reset => wire.cut(),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_connection_is_cut_again_and_again() {
    let (Some(direct), Some(uri)) = (shared(), shared_uri()) else { return };
    let client = Client::new(&direct, Kind::Durable).await;
    let reply_to = format!("{}-answers", client.queue);
    client.declare(Kind::Durable, &reply_to).await;
    let wire = Wire::to(&target(&uri)).await;
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let act: Act = Arc::new(move |request, context| {
        counted.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            context.set_reply(Reply::ok(request.body_bytes())).expect("it fits");
            Ok(())
        })
    });
    let mut settings = queue(&client);
    // A silent connection ends after two heartbeats, at either end.
    settings.broker = broker(&format!("{}?heartbeat=2", wire.uri(&uri)));
    // Losses count as attempts, which must not be limited here.
    settings.max_attempts = None;
    let worker = Running::start(settings, 64, Arc::clone(&act));
    let all = messages();
    let faults = FAULTS.len() as u64 * (all / 4_000).max(2);
    let writer = Client::without_queue(&direct, &client.queue).await;
    let answers = Answers::default();
    let publish = async {
        for number in 0..all {
            answers.until(number.saturating_sub(AHEAD)).await;
            assert!(writer.publish(persistent(&number.to_string(), &reply_to), number.to_string().as_bytes()).await);
        }
    };
    let mut taken = client.taken_from(&reply_to).await;
    let read = async {
        while *answers.different.borrow() < all {
            answers.take(&mut taken).await;
        }
    };
    // Finds hangs; does not measure speed.
    let patience = Duration::from_secs(300 + all / 10);
    let whole = async { tokio::join!(publish, read, go_wrong(&wire, &answers, all, faults)) };
    let ended = tokio::time::timeout(patience, whole).await;
    worker.drained().await;
    // The last acknowledgements may have been lost with a connection.
    let again = Running::start(Queue { max_attempts: None, ..queue(&client) }, 64, act);
    client.until_depth(0, 1).await;
    again.drained().await;
    // Everything before this marker was received.
    let end = Client::without_queue(&direct, &reply_to).await;
    assert!(end.publish(Client::properties(END, "/end"), END.as_bytes()).await);
    while answers.take(&mut taken).await {}
    let came = answers.came.lock().expect("unpoisoned").clone();
    println!(
        "{all} requests, {faults} faults, {} connections, {} runs: lost {}, answered twice {}",
        wire.connections(),
        runs.load(Ordering::Relaxed),
        all - came.len() as u64,
        came.values().map(|times| times - 1).sum::<u64>()
    );
    assert_eq!(came.len() as u64, all);
    ended.expect("every request is answered in time");
    client.until_depth(0, 0).await;
    client.delete_queue().await;
}
