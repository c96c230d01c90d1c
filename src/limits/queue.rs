//! Bounds of the embedded queue.

use std::time::Duration;

/// How many runs a task of the embedded queue may have.
pub const QUEUE_RUNS_MAX: usize = 50;
/// How far into the future a deadline may lie.
pub const QUEUE_DEADLINE_MAX: Duration = Duration::from_secs(5 * 24 * 3600);
/// How far the clocks of the embedded queue and its callers may differ.
pub const QUEUE_CLOCK_DRIFT_MAX: Duration = Duration::from_secs(15 * 60);
/// How far out of its time a certificate is still accepted.
pub const QUEUE_CERTIFICATE_DRIFT: Duration = Duration::from_secs(5 * 60);
/// How long a certificate may last.
pub const QUEUE_CERTIFICATE_TTL_MAX: Duration = Duration::from_secs(31 * 24 * 3600);
/// How many tasks one task may depend on.
pub const QUEUE_DEPENDENCIES_MAX: usize = 1_000;
/// How long a claim lasts, unless configured.
pub const QUEUE_CLAIM_TIMEOUT: Duration = Duration::from_secs(1200);
/// How long after its end a claim is resolved, unless configured.
pub const QUEUE_CLAIM_DELAY: Duration = Duration::from_secs(5);
/// How long after its deadline a task is resolved, unless configured.
pub const QUEUE_DEADLINE_DELAY: Duration = Duration::from_secs(5);
/// How long signed poll URLs are accepted, unless configured.
pub const QUEUE_POLL_URL_TTL: Duration = Duration::from_secs(30 * 60);
/// The shortest life of signed poll URLs.
pub const QUEUE_POLL_URL_TTL_MIN: Duration = Duration::from_secs(1);
/// The shortest that messages may be hidden; the storage service counts in seconds.
pub const QUEUE_VISIBILITY_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// How long a received message is hidden, unless configured.
pub const QUEUE_VISIBILITY_TIMEOUT: Duration = Duration::from_secs(300);
/// The longest that a message may be hidden.
pub const QUEUE_VISIBILITY_TIMEOUT_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long a request for work is held while there is none.
pub const QUEUE_LONG_POLL_WAIT: Duration = Duration::from_secs(20);
/// How many requests for work are held at once.
pub const QUEUE_LONG_POLLS_MAX: usize = 4_096;
/// How many requests for work may wait in one task queue.
pub const QUEUE_WAITERS_MAX: usize = 4_096;
/// How many connections the embedded queue serves at once.
pub const QUEUE_CONNECTIONS_MAX: usize = 8_192;
/// How long a connection to the embedded queue may stay without a byte moving.
pub const QUEUE_CONNECTION_IDLE_MAX: Duration = Duration::from_secs(90);
/// How many connections may be open whose caller has not proved itself.
pub const QUEUE_UNAUTHENTICATED_MAX: usize = 64;
/// How long a connection may stay open whose caller does not prove itself; longer than a request for work is held.
pub const QUEUE_UNAUTHENTICATED_AGE_MAX: Duration = Duration::from_secs(30);
/// How long the next connection waits for a stranger to go before all of them are told to.
pub const QUEUE_UNAUTHENTICATED_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long to wait before the next attempt to accept a connection.
pub const QUEUE_ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(100);
/// The largest head of a request; a certificate with its scopes is in it.
pub const QUEUE_HEAD_BYTES_MAX: usize = 32 << 10;
/// How many headers a request may have.
pub const QUEUE_HEAD_LINES_MAX: usize = 100;
/// How much of a connection is read ahead.
pub const QUEUE_BUFFER_BYTES_MAX: usize = QUEUE_HEAD_BYTES_MAX;
/// The largest body of most calls.
pub const QUEUE_SMALL_BODY_BYTES_MAX: usize = 64 << 10;
/// The largest body of a caller who has not proved itself.
pub const QUEUE_UNAUTHENTICATED_BODY_BYTES_MAX: usize = 16 << 10;
/// How many bytes of bodies are held at once; who comes with more is told to try again.
pub const QUEUE_BODIES_BYTES_MAX: usize = 64 << 20;
/// How much of a refused body is read on, so that its sender reads the refusal.
pub const QUEUE_DISCARD_BYTES_MAX: usize = 16 << 20;
/// How long a refused body is read on.
pub const QUEUE_DISCARD_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest body of `createTask`.
pub const QUEUE_BODY_BYTES_MAX: usize = 10 << 20;
/// How long a request body may take to come, artifacts aside.
pub const QUEUE_BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// The largest artifact that is stored, unless configured.
pub const QUEUE_ARTIFACT_BYTES_MAX: u64 = 4 << 30;
/// How many jobs may wait for the store.
pub const QUEUE_JOBS_MAX: usize = 4_096;
/// How many jobs share a commit.
pub const QUEUE_BATCH_MAX: usize = 512;
/// How much of the journal beside the queue's file is kept once it has been worked in.
pub const QUEUE_JOURNAL_BYTES_KEPT: i64 = 16 << 20;
/// How many prepared statements are kept.
pub const QUEUE_STATEMENTS_MAX: usize = 64;
/// How many tasks past their deadline a request for work looks beyond.
pub const QUEUE_CLAIM_SCAN_MAX: usize = 256;
/// How many entries a round of a resolver deals with.
pub const QUEUE_SWEEP_MAX: usize = 512;
/// How often expired tasks and artifacts are looked for.
pub const QUEUE_SWEEP_INTERVAL: Duration = Duration::from_secs(600);
/// How long the embedded queue may go without looking at its clock.
pub const QUEUE_CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The shortest rest between two attempts at what is due.
pub const QUEUE_RETRY_DELAY_MIN: Duration = Duration::from_millis(10);
/// The longest rest after failures of the queue's file; each failure doubles the rest.
pub const QUEUE_RETRY_DELAY_MAX: Duration = Duration::from_secs(30);
/// How many entries a page of a listing has at most.
pub const QUEUE_PAGE_MAX: usize = 1_000;
/// How many bytes of definitions an answer holds, one task in any case; a worker reads [`JSON_BODY_BYTES_MAX`](super::JSON_BODY_BYTES_MAX).
pub const QUEUE_REPLY_BYTES_MAX: usize = 12 << 20;
/// How long the embedded queue waits for calls under way when it is stopped.
pub const QUEUE_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long after an exception artifacts of the run are still taken.
pub const QUEUE_LATE_ARTIFACTS_WINDOW: Duration = Duration::from_secs(25 * 60);
/// How long the address that an artifact is put to is accepted.
pub const QUEUE_PUT_URL_TTL: Duration = Duration::from_secs(45 * 60);
/// How long the address that an artifact is got from is accepted.
pub const QUEUE_GET_URL_TTL: Duration = Duration::from_secs(30 * 60);
/// How long the next piece of an artifact may take to come.
pub const QUEUE_CHUNK_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an artifact may take to come, all in all; its address lives no longer.
pub const QUEUE_UPLOAD_TIMEOUT: Duration = QUEUE_PUT_URL_TTL;
/// How much of a stored artifact is read at a time.
pub const QUEUE_READ_BYTES: usize = 64 << 10;
/// How long a request for work is held while too many others already are.
pub const QUEUE_OVERLOADED_POLL_WAIT: Duration = Duration::from_secs(1);
