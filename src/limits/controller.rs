//! Bounds of a controller of worker groups and of its drivers.

use std::time::Duration;

/// How many orphans a controller has in hand at once.
pub const CONTROLLER_ORPHANS_MAX: u16 = 512;
/// How many of them it publishes before it hears what the broker says.
pub const CONTROLLER_BATCH_MAX: usize = 128;
/// How often a request may come to the orphans before it is answered with an error.
pub const CONTROLLER_HOPS_MAX: u64 = 8;
/// How many requests of one key wait at a controller for room in their queue, which is full; the others are answered so. As many wait
/// for a queue that is slow to be made, or to confirm, where a controller has no room left.
pub const CONTROLLER_QUEUE_FULL_WAITING_MAX: usize = 32;
/// How long a queue is slow to be made until that counts.
pub const CONTROLLER_QUEUE_DECLARE_SLOW: Duration = Duration::from_secs(5);
/// How long an orphan waits for its queue before it is answered with an error; so one key does not hold up the others.
pub const CONTROLLER_ORPHAN_TIMEOUT: Duration = Duration::from_secs(60);
/// How often in a row a queue could not be made before the orphans of its key wait for it no longer.
pub const CONTROLLER_BIND_ATTEMPTS_MAX: u32 = 5;
/// How often a controller gives an answer in a worker's place whose queue refuses it.
pub const CONTROLLER_ANSWER_ATTEMPTS_MAX: u32 = 5;
/// How long it waits before it gives it again.
pub const CONTROLLER_ANSWER_RETRY_DELAY: Duration = Duration::from_millis(500);
/// How many dead letters a controller has in hand at once.
pub const CONTROLLER_DEAD_LETTERS_MAX: u16 = 256;
/// How often a controller makes what of its exchanges and bindings somebody has taken away.
pub const CONTROLLER_TOPOLOGY_INTERVAL: Duration = Duration::from_secs(5);
/// How often a controller sees to it that the policies of its queues are what they should be.
pub const CONTROLLER_POLICIES_INTERVAL: Duration = Duration::from_secs(15);
/// How long it waits for the first of these looks before it goes on without.
pub const CONTROLLER_POLICIES_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a controller looks after its workers and its queues.
pub const CONTROLLER_RECONCILE_INTERVAL: Duration = Duration::from_millis(500);
/// For how long after it has decided about its groups a controller gathers changes before it decides anew.
pub const CONTROLLER_PLAN_DEBOUNCE: Duration = Duration::from_millis(50);
/// The largest headers of a request that a controller hands on: it adds some of its own, and a broker takes no more than 128 KiB.
pub const CONTROLLER_HEADERS_BYTES_MAX: usize = 120 << 10;
/// How often, in seconds, a controller and its broker hear of each other: the broker gives the pool to another one when it has heard
/// nothing for two times as long.
pub const CONTROLLER_HEARTBEAT: u16 = 5;
/// How often a controller that stands by looks whether the other one has gone.
pub const CONTROLLER_STANDBY_INTERVAL: Duration = Duration::from_secs(1);
/// How many steps about queues are carried out at once, each on a channel of its own.
pub const CONTROLLER_QUEUE_STEPS_CONCURRENT_MAX: usize = 8;
/// How many queues are looked into at once, the same.
pub const CONTROLLER_QUEUE_CHECKS_CONCURRENT_MAX: usize = 4;
/// The pause before a queue is looked into again of which nothing was heard.
pub const CONTROLLER_QUEUE_CHECK_RETRY_DELAY: Duration = Duration::from_secs(20);
/// How many steps about queues may wait to be carried out.
pub const CONTROLLER_QUEUE_STEPS_QUEUED_MAX: usize = 4096;
/// How long a worker counts as busy after it has reported a request, unless it says that it is ready again. One that goes on with it
/// says so once a minute.
pub const CONTROLLER_BUSY_TTL: Duration = Duration::from_secs(90);
/// A worker that was ready for so long has lasted.
pub const CONTROLLER_WORKER_STABLE_AFTER: Duration = Duration::from_secs(30);
/// How many who ask for the state of a pool may wait for its controller at once.
pub const CONTROLLER_STATUS_REQUESTS_MAX: usize = 64;
/// How many groups of one pool may be there at once.
pub const CONTROLLER_GROUPS_MAX: usize = 10_000;
/// How long a controller waits to hear which workers are there before it goes on without.
pub const CONTROLLER_WORKERS_TIMEOUT: Duration = Duration::from_secs(5);
/// How many calls of a driver may be under way at once.
pub const DRIVER_CALLS_MAX: usize = 16;
/// How long a call of a driver may take.
pub const DRIVER_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// How many workers may wait to be started or stopped; what exceeds it is decided anew.
pub const DRIVER_COMMANDS_QUEUED_MAX: usize = 1024;
/// How much a driver may have to say that nobody has heard.
pub const DRIVER_EVENTS_QUEUED_MAX: usize = 256;
/// How much is kept of the words for how a worker has ended.
pub const DRIVER_EXIT_REASON_BYTES_MAX: usize = 1024;
/// How much of the end of a log is kept of a worker that has ended.
pub const DRIVER_LOG_TAIL_BYTES_MAX: u64 = 4096;
/// How long after its control group was made a worker has been written down, or never is.
pub const DRIVER_START_RECORD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the log of a worker of this host may be before its beginning is cut off.
pub const DRIVER_LOG_BYTES_MAX: u64 = 64 << 20;
/// How much of its end is kept then.
pub const DRIVER_LOG_BYTES_KEPT: u64 = 8 << 20;
/// How many logs are kept of workers of this host that have ended, in each pool.
pub const DRIVER_ENDED_LOGS_MAX: usize = 200;
/// How often a driver that asks somebody else asks who is there.
pub const DRIVER_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// How much a driver reads of what is said to it: a list of some thousands of pods.
pub const DRIVER_OUTPUT_BYTES_MAX: usize = 64 << 20;
/// How long the output of such a program is waited for after its end, where something it has started holds it open.
pub const DRIVER_OUTPUT_TIMEOUT: Duration = Duration::from_secs(1);
/// How many claimed tasks of a queue of elsewhere are counted; more need no more workers than a host has.
pub const DEMAND_CLAIMED_MAX: usize = 1_000;
/// How many counts may wait to be taken in.
pub const DEMAND_COUNTS_MAX: usize = 16;
/// The shortest token that orders over HTTP may need.
pub const TOKEN_BYTES_MIN: usize = 16;
/// The longest time that an order to a controller may be for.
pub const COMMAND_DURATION_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How long a request that has ended its worker waits until it is known which worker that was.
pub const CONTROLLER_WORKER_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// How many of the last lines of a worker's log are kept with a request that it ended under.
pub const CONTROLLER_LOG_TAIL_LINES_MAX: usize = 20;
/// How many requests that were put aside are looked at in one go.
pub const CONTROLLER_POISON_MAX: usize = 2_000;
/// How long that may take. One step of it may take longer, where a request is large.
pub const CONTROLLER_POISON_TIMEOUT: Duration = Duration::from_secs(10);
/// How many who want something of them may wait.
pub const CONTROLLER_POISON_REQUESTS_MAX: usize = 16;
/// How many reports of workers are taken in before anything else is looked at.
pub const CONTROLLER_REPORTS_BATCH_MAX: usize = 128;
/// How often a controller asks the management interface what workers hold. RabbitMQ counts every five seconds.
pub const CONTROLLER_COUNTS_INTERVAL: Duration = Duration::from_secs(2);
/// For how long such counts are good.
pub const CONTROLLER_COUNTS_TTL: Duration = Duration::from_secs(15);
