//! Every bound that has a number, in one place.

use std::time::Duration;

/// The largest poll answer that is read.
pub const POLL_BODY_BYTES_MAX: usize = 1 << 20;
/// The largest JSON answer of a queue that is read; 32 task definitions of about 1 MiB would not fit a fleet's memory.
pub const JSON_BODY_BYTES_MAX: usize = 16 << 20;
/// The most entries one poll may bring.
pub const POLL_MESSAGES_MAX: u8 = 32;
/// How deep XML elements of a poll answer may nest.
pub const XML_DEPTH_MAX: usize = 16;
/// How many attributes an XML element of a poll answer may have.
pub const XML_ATTRIBUTES_MAX: usize = 64;
/// How long a call that is not a long poll may take.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a long poll may take; the service answers after 20 s, proxies give up after 60 s.
pub const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// How long making a connection may take.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a connection may stay unused; the service closes its own after 90 s.
pub const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How much of a refusal's text is kept for the log.
pub const REFUSAL_TEXT_BYTES_MAX: usize = 300;
/// How many lanes (queues of one source) are polled.
pub const LANES_MAX: usize = 64;
/// The largest answer of a refused call that is read, to find its useful line.
pub const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// The longest lease that is believed. Taskcluster grants 20 minutes.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// How long before signed URLs end they are renewed, where they live long enough for that.
pub const SIGNED_URLS_MARGIN: Duration = Duration::from_secs(5 * 60);
/// The longest wait that a service's `Retry-After` may ask for.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(10 * 60);
/// How many pages of a listing are read in one go.
pub const LISTING_PAGES_MAX: usize = 20;
/// How many entries a page of claimed tasks is asked to have.
pub const CLAIMED_PAGE_ENTRIES: usize = 100;
/// Content below this many bytes travels inside the request to the object service, as other Taskcluster clients do it.
pub const ARTIFACT_INLINE_BYTES_MAX: u64 = 8 << 10;
/// How much of an artifact is read from its file at a time.
pub const ARTIFACT_CHUNK_BYTES: usize = 256 << 10;
/// The slowest upload that is waited for, on top of [`CALL_TIMEOUT`].
pub const ARTIFACT_BYTES_PER_SECOND_MIN: u64 = 128 << 10;
/// The longest an upload may take; Taskcluster's upload URLs live 45 minutes.
pub const ARTIFACT_UPLOAD_TIMEOUT_MAX: Duration = Duration::from_secs(45 * 60);
/// How often an artifact may lead on before its content is reached: a link, a reference, a bucket.
pub const ARTIFACT_HOPS_MAX: u8 = 4;
/// The largest artifact that a queue in memory keeps.
pub const MEMORY_ARTIFACT_BYTES_MAX: usize = 64 << 20;

/// How many bytes of a task's log are kept from its start.
pub const LOG_HEAD_BYTES: u64 = 48 << 20;
/// How many bytes of a task's log are kept from its end.
pub const LOG_TAIL_BYTES: u64 = 16 << 20;
/// The longest line that the worker itself writes into a task's log.
pub const LOG_NOTE_BYTES_MAX: usize = 4 << 10;

/// How many artifacts a task may declare, and how many its folders may hold in all.
pub const ARTIFACTS_MAX: usize = 10_000;
/// The largest artifact; what S3 takes in one request.
pub const ARTIFACT_BYTES_MAX: u64 = 5 << 30;
/// The longest name of an artifact.
pub const ARTIFACT_NAME_BYTES_MAX: usize = 1024;
/// The longest path of an artifact's file below the task's folder.
pub const ARTIFACT_PATH_BYTES_MAX: usize = 4096;
/// How deep the folder of an artifact may nest.
pub const ARTIFACT_DEPTH_MAX: usize = 32;
/// How many bytes of artifacts a task may hand over in memory, all together.
pub const ARTIFACTS_IN_MEMORY_BYTES_MAX: usize = 1 << 20;
/// The longest text of an `error` artifact; the queue takes 4096.
pub const ARTIFACT_MESSAGE_BYTES_MAX: usize = 4096;

/// How many violations of a schema are listed in a task's log.
pub const VIOLATIONS_MAX: usize = 20;
/// The longest sentence about one violation.
pub const VIOLATION_BYTES_MAX: usize = 500;
/// The largest configuration file that is read.
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;
/// The largest file that is read for a secret.
pub const SECRET_BYTES_MAX: u64 = 64 << 10;
/// How many problems of one configuration are shown.
pub const CONFIG_PROBLEMS_MAX: usize = 20;
/// How deep tables and lists of a configuration may nest.
pub const CONFIG_DEPTH_MAX: usize = 16;
/// How many artifacts of a task are uploaded at once.
pub const UPLOADS_AT_ONCE: usize = 8;
/// How often an upload without a definite answer is sent in all.
pub const UPLOAD_TRIES_MAX: u32 = 6;
/// How long a handler may take beyond the end of a payload's grace before it is dropped.
pub const KILL_SLACK: Duration = Duration::from_secs(2);
/// The largest task definition that `journeyman task create` sends.
pub const TASK_DEFINITION_BYTES_MAX: u64 = 1 << 20;
/// How many pages of a listing `journeyman task list` reads.
pub const TASK_LIST_PAGES_MAX: usize = 10;
/// The first pause of a command that waits for a task.
pub const TASK_WAIT_POLL_MIN: Duration = Duration::from_millis(50);
/// The longest pause of a command that waits for a task.
pub const TASK_WAIT_POLL_MAX: Duration = Duration::from_secs(2);
/// How long after a payload's end its output is waited for, while something it left behind holds it open.
pub const PROCESS_DRAIN: Duration = Duration::from_secs(1);
/// How long processes may take to go after they were killed, and their output to end.
pub const PROCESS_KILLED_WAIT: Duration = Duration::from_secs(5);
/// How long before the end of an order's grace a payload is killed, so that its end is seen in time.
pub const PROCESS_KILL_MARGIN: Duration = Duration::from_secs(2);
/// How much of a payload's output is read at a time.
pub const PROCESS_READ_BYTES: usize = 16 << 10;
/// How long a payload may take to end by itself once it was told to, unless configured.
pub const PROCESS_GRACE: Duration = Duration::from_secs(10);
/// How long a program may take to check a payload.
pub const PROGRAM_CHECK_TIME: Duration = Duration::from_secs(60);
/// The longest line that a program may send to the worker.
pub const PROGRAM_LINE_BYTES_MAX: usize = 64 << 10;
/// How many bytes of a program's lines are read at a time.
pub const PROGRAM_READ_BYTES: usize = 8 << 10;
/// How many reasons a program may give for refusing a payload.
pub const PROGRAM_REASONS_MAX: usize = 20;
/// How many lines of a program are heeded.
pub const PROGRAM_LINES_MAX: usize = 20_000;
/// How many complaints about a program's lines go into the log.
pub const PROGRAM_COMPLAINTS_MAX: usize = 20;
/// The largest schema file that is read.
pub const SCHEMA_BYTES_MAX: u64 = 1 << 20;
