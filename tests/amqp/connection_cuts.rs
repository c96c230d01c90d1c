//! A connection that fails repeatedly while requests are processed: none may be lost. `JOURNEYMAN_TEST_AMQP_MESSAGES` is the number of
//! requests. Without it, faults begin for 30 seconds.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use journeyman::source::amqp::AmqpSourceConfig as Queue;

use crate::amqp::faults::persistent;
use crate::amqp::support::{Consumed, Kind, Running, broker, queue, replies, wired};
use crate::support::Repeats;
use crate::support::wire::Way;

/// In turn. Heartbeats find the silent ones.
const FAULTS: [Fault; 4] =
    [Fault::Slow(Duration::from_millis(5)), Fault::For(Way::Stall), Fault::Reset, Fault::For(Way::HalfOpen)];

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// Delays each chunk by this, until the next fault.
    Slow(Duration),
    /// Lasts for the rest of the connection.
    For(Way),
    Reset,
}

/// The number of messages for each fault.
const BATCH: u64 = 400;

/// Counts the next reply by its correlation id.
async fn count_reply(replies: &mut Consumed, counts: &mut BTreeMap<String, u64>) {
    let reply = replies.next().await;
    let id = reply.properties.correlation_id().as_ref().expect("an id").to_string();
    assert_eq!(reply.data, id.as_bytes());
    *counts.entry(id).or_insert(0) += 1;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_when_the_connection_is_cut_again_and_again() {
    let Some((client, wire, mut settings)) = wired(Kind::Durable).await else { return };
    let reply_to = format!("{}-replies", client.queue);
    client.declare(Kind::Durable, &reply_to).await;
    let runs = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&runs);
    let act = replies(move |request, _| {
        counted.fetch_add(1, Ordering::Relaxed);
        request.body.to_vec()
    });
    // A silent connection ends after two heartbeats, at either end.
    let uri = wire.uri(&crate::amqp::support::shared_uri().expect("a broker"));
    settings.broker = broker(&format!("{uri}?heartbeat=2"));
    // Losses count as attempts, which must not be limited here.
    settings.max_attempts = None;
    let worker = Running::start(settings, 64, Arc::clone(&act));
    let repeats = Repeats::new("JOURNEYMAN_TEST_AMQP_MESSAGES", Duration::from_secs(30));
    let (mut faults, mut published) = (0, 0);
    let mut replies = client.consume(&reply_to).await;
    let mut counts = BTreeMap::new();
    // Each of them comes once, whatever the time.
    while faults < FAULTS.len() || repeats.again(usize::try_from(published).expect("few")) {
        let fault = FAULTS[faults % FAULTS.len()];
        faults += 1;
        for number in published..published + BATCH {
            if number == published + BATCH / 2 {
                wire.set(Way::Carry);
                match fault {
                    Fault::Slow(span) => wire.set(Way::Delay(span)),
                    Fault::For(way) => wire.strand(way),
                    Fault::Reset => wire.cut(),
                }
            }
            assert!(client.publish(persistent(&number.to_string(), &reply_to), number.to_string().as_bytes()).await);
        }
        published += BATCH;
        while (counts.len() as u64) < published {
            count_reply(&mut replies, &mut counts).await;
        }
    }
    worker.drained().await;
    // The last acknowledgements may have been lost with a connection.
    let second = Running::start(Queue { max_attempts: None, ..queue(&client) }, 64, act);
    client.until_depth(0, 1).await;
    second.drained().await;
    println!(
        "{published} requests, {faults} faults, {} connections, {} runs, {} replies more than requests",
        wire.connections(),
        runs.load(Ordering::Relaxed),
        counts.values().sum::<u64>() - published
    );
    client.delete_empty_queue().await;
}
