//! Limits of ZooKeeper sources and commands.

use core::time::Duration;

/// As Zuul's: below the 1 MiB of a server, which counts the path too.
pub const ZOOKEEPER_NODE_BYTES_MAX: usize = 1_000_000;
/// The bytes of data in shards, uncompressed.
pub const ZOOKEEPER_SHARDED_BYTES_MAX: usize = 64 << 20;
pub const ZOOKEEPER_RESULT_BYTES_MAX: usize = 16 << 20;
/// Of the node of an event; data beyond it are stored beside it. Zuul's limit for an event in a transaction.
pub const ZOOKEEPER_EVENT_BYTES_MAX: usize = 500_000;
/// Unread events of one queue.
pub const ZOOKEEPER_EVENTS_QUEUED_MAX: usize = 90_000;
pub const ZOOKEEPER_MULTI_WRITES_MAX: usize = 64;
pub const ZOOKEEPER_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
pub const ZOOKEEPER_CALL_TIMEOUT: Duration = Duration::from_secs(20);
pub const ZOOKEEPER_CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
pub const ZOOKEEPER_RETRY_DELAY: Duration = Duration::from_millis(200);
pub const ZOOKEEPER_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
/// How often a worker that does not watch its queue looks whether what it holds was canceled.
pub const ZOOKEEPER_HELD_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// How often such a worker reads the requests again that did not wait for a worker.
pub const ZOOKEEPER_OTHERS_READ_INTERVAL: Duration = Duration::from_secs(5);
/// Lost claims and cancels that the worker has not received yet; more wait.
pub const ZOOKEEPER_EVENTS_MAX: usize = 64;
/// Reads of a walk at the same time.
pub const ZOOKEEPER_READS_CONCURRENT_MAX: usize = 256;
/// Nodes at a lock that `zk show` reads.
pub const ZOOKEEPER_CONTENDERS_MAX: usize = 10_000;
/// Nodes that `zk doctor` looks at.
pub const ZOOKEEPER_WALK_NODES_MAX: usize = 50_000;
/// Nodes of each part of the tree that the page of a source looks at, each time that it is shown.
pub const ZOOKEEPER_INSPECT_NODES_MAX: usize = 2_000;
/// Rows of each of its tables.
pub const ZOOKEEPER_INSPECT_ROWS_MAX: usize = 50;
/// Between a host and the server; ages are compared with minutes.
pub const ZOOKEEPER_CLOCK_SKEW_MAX: Duration = Duration::from_secs(5);
/// How old something without an owner is when it is removed.
pub const ZOOKEEPER_LEFTOVER_AGE: Duration = Duration::from_secs(300);
/// Before another try of a build whose semaphore had no free place, or of a request whose lock another process held. Zuul's executors wait 30 s.
pub const ZOOKEEPER_SEMAPHORE_RETRY: Duration = Duration::from_secs(10);
/// How long a playbook after the run may take if its job has no `post_timeout`. Zuul sets no limit then; this is the longest that its
/// tenants allow by default.
pub const ZUUL_POST_TIMEOUT_MAX: Duration = Duration::from_secs(10_800);
/// The time between two clean-ups of a queue.
pub const ZOOKEEPER_CLEAN_INTERVAL: Duration = Duration::from_secs(60);
/// Between the two looks that find a request running and unlocked.
pub const ZOOKEEPER_SECOND_LOOK_DELAY: Duration = Duration::from_secs(5);
/// Attempts of a task in the native layout that its handler asks for again.
pub const ZOOKEEPER_ATTEMPTS_MAX: u32 = 5;
/// Of a request: a server drops the connection of a longer one, unless its `jute.maxbuffer` was raised.
pub const ZOOKEEPER_REQUEST_BYTES_MAX: usize = 0xf_ffff;
/// Of an answer. The longest are the names in a folder, of 40 bytes each.
pub const ZOOKEEPER_ANSWER_BYTES_MAX: usize = 32 << 20;
/// The bytes of the answer that grants a session, which has 37.
pub const ZOOKEEPER_HANDSHAKE_BYTES_MAX: usize = 1 << 10;
/// The bytes of the input buffer, beside the part of an answer that it holds.
pub const ZOOKEEPER_READ_BYTES: usize = 16 << 10;
/// Calls that wait to be sent.
pub const ZOOKEEPER_CALLS_QUEUED_MAX: usize = 256;
/// Calls that wait for their answers. A server reads no more than a thousand of all its clients together.
pub const ZOOKEEPER_CALLS_IN_FLIGHT_MAX: usize = 1_000;
/// Events of a recursive watch that wait to be read; on more, the tree is read again.
pub const ZOOKEEPER_WATCH_EVENTS_MAX: usize = 4_096;
/// Of one try to connect, which otherwise has a third of the session's timeout.
pub const ZOOKEEPER_CONNECT_ATTEMPT_MAX: Duration = Duration::from_secs(5);
pub const ZOOKEEPER_CONNECT_ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Between two tries to connect; from the first it doubles to the second.
pub const ZOOKEEPER_RECONNECT_DELAY_MIN: Duration = Duration::from_millis(20);
pub const ZOOKEEPER_RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);
