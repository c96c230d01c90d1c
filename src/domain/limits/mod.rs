//! Named limits: those of the worker here, those of other areas in the submodules.

mod amqp;
mod controller;
mod delivery;
mod notifier;
mod operator_interfaces;
mod queue;
mod screwdriver;
mod sqlite;
mod zookeeper;

use core::time::Duration;

pub use amqp::*;
pub use controller::*;
pub use delivery::*;
pub use notifier::*;
pub use operator_interfaces::*;
pub use queue::*;
pub use screwdriver::*;
pub use sqlite::*;
pub use zookeeper::*;

pub const POLL_BODY_BYTES_MAX: usize = 1 << 20;
/// The largest JSON response of a queue; 32 task definitions of 1 MiB each would not fit a fleet's memory.
pub const JSON_BODY_BYTES_MAX: usize = 16 << 20;
/// The limit of Azure Queue Storage and of `claimWork`.
pub const POLL_MESSAGES_MAX: u8 = 32;
pub const XML_TAG_BYTES_MAX: usize = 1 << 10;
/// The time of calls that are not long polls.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// The service answers after 20 s; proxies give up after 60 s.
pub const LONG_POLL_TIMEOUT: Duration = Duration::from_secs(60);
/// For the service to notice that the connection of a long poll is closed, before its claims are listed.
pub const CLOSED_POLL_SETTLE: Duration = Duration::from_millis(300);
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The service closes idle connections after 90 s.
pub const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
pub const REFUSAL_TEXT_BYTES_MAX: usize = 300;
/// Priority queues of one source.
pub const PRIORITY_QUEUES_MAX: usize = 64;
/// Deliveries of a message after which an alert is raised.
pub const DEQUEUE_ALERT: u32 = 10;
/// Rejections of the credentials in a row after which the worker exits.
pub const AUTH_FAILURES_MAX: u32 = 10;
pub const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// The longest lease that is believed; Taskcluster grants 20 minutes.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// Signed URLs are renewed this long before they expire, if they live long enough.
pub const SIGNED_URL_RENEWAL_MARGIN: Duration = Duration::from_secs(5 * 60);
/// Pages of a listing read at a time.
pub const LISTING_PAGES_MAX: usize = 20;
pub const CLAIMED_PAGE_ENTRIES: usize = 100;
pub const ARTIFACT_CHUNK_BYTES: usize = 256 << 10;
/// The slowest upload that is waited for, in addition to [`CALL_TIMEOUT`].
pub const ARTIFACT_BYTES_PER_SECOND_MIN: u64 = 128 << 10;
/// Taskcluster's upload URLs live 45 minutes.
pub const ARTIFACT_TRANSFER_TIMEOUT_MAX: Duration = Duration::from_secs(45 * 60);
/// Links, references and redirects that are followed to the content of an artifact.
pub const ARTIFACT_HOPS_MAX: u8 = 4;
pub const LOG_HEAD_BYTES: u64 = 48 << 20;
pub const LOG_TAIL_BYTES: u64 = 16 << 20;
/// The longest line that the worker itself writes to a task's log.
pub const LOG_NOTE_BYTES_MAX: usize = 4 << 10;
/// Output that waits for the disk before its payload has to wait; of the worker's own lines, twice as much.
pub const LOG_PENDING_BYTES: u64 = 256 << 10;
/// Disk space that is allocated ahead for the last lines of a log.
pub const LOG_RESERVE_BYTES: u64 = 64 << 10;
/// The last lines that are kept when the disk takes no more, and so much of what came before them.
pub const LOG_LAST_BYTES: usize = 24 << 10;
/// Shorter text cannot be distinguished from ordinary text.
pub const REDACT_SECRET_CHARS_MIN: usize = 6;
/// The longest text that is searched for in one piece; bounds how much of a log is held back.
pub const REDACT_PIECE_BYTES_MAX: usize = 4 << 10;
/// How many bytes recognize a pattern: a token's header, a URL's user info.
pub const REDACT_PATTERN_BYTES_MAX: usize = 1 << 10;
/// The longest private key: RSA with 8192 bits takes 6.4 KiB. An unterminated block is redacted this far.
pub const REDACT_KEY_BLOCK_BYTES_MAX: usize = 8 << 10;
/// Secrets that a task adds, with all their encodings.
pub const REDACT_TASK_BYTES_MAX: usize = 1 << 20;
/// How long bytes that may begin a secret are held back while no more follow.
pub const REDACT_HOLD_MAX: Duration = Duration::from_secs(1);
/// Declared artifacts of a task, and files in its declared directories.
pub const ARTIFACTS_MAX: usize = 10_000;
/// What S3 accepts in one request.
pub const ARTIFACT_BYTES_MAX: u64 = 5 << 30;
pub const ARTIFACT_CONTENT_TYPE_BYTES_MAX: usize = 255;
pub const ARTIFACT_NAME_BYTES_MAX: usize = 1024;
pub const ARTIFACT_DEPTH_MAX: usize = 32;
/// Symbolic links on the way to one artifact, as Linux follows them.
pub const LINKS_FOLLOWED_MAX: usize = 40;
/// The message of an `error` artifact; the queue accepts 4096.
pub const ARTIFACT_MESSAGE_BYTES_MAX: usize = 4096;
/// Schema violations listed in a task's log.
pub const VIOLATIONS_MAX: usize = 20;
pub const VIOLATION_BYTES_MAX: usize = 500;
pub const CONFIG_BYTES_MAX: u64 = 1 << 20;
pub const SECRET_BYTES_MAX: u64 = 64 << 10;
pub const CONFIG_PROBLEMS_MAX: usize = 20;
pub const CONFIG_DEPTH_MAX: usize = 16;
/// The uploads of one task.
pub const UPLOADS_CONCURRENT_MAX: usize = 8;
/// How long uploads of a task without a definite answer are retried; the lease is extended meanwhile.
pub const UPLOAD_RETRY_MAX: Duration = Duration::from_secs(10 * 60);
/// How long uploads are retried while the storage's disk is full: until other tasks have ended and their files are gone.
pub const UPLOAD_FULL_RETRY_MAX: Duration = Duration::from_secs(60);
/// How often an outage of the artifact storage is logged while it lasts.
pub const STORAGE_WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// How long after a payload's termination grace its handler is dropped.
pub const KILL_SLACK: Duration = crate::lease::KILL_SLACK;
pub const TASK_DEFINITION_BYTES_MAX: u64 = 1 << 20;
pub const TASK_LIST_PAGES_MAX: usize = 10;
pub const TASK_WAIT_POLL_MIN: Duration = Duration::from_millis(50);
/// The time between two readings of a log that grows.
pub const TASK_LOG_POLL: Duration = Duration::from_millis(500);
/// The log of a running task is read until it gives nothing new for so long.
pub const TASK_LOG_STALL: Duration = Duration::from_secs(1);
pub const TASK_WAIT_POLL_MAX: Duration = Duration::from_secs(2);
/// A task that is still pending after so long is explained to who waits for it.
pub const TASK_WAIT_EXPLAINED_AFTER: Duration = Duration::from_secs(2);
/// How long the end of a log, or the workers of a queue, may take to be read.
pub const TASK_CARD_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of the end of a log in which its last lines are found.
pub const TASK_CARD_LOG_BYTES_MAX: usize = 64 * 1024;
/// Other queues whose workers are counted.
pub const TASK_CARD_WORKERS_MAX: usize = 3;
/// How long output is read after a payload's end, while a background process holds it open.
pub const PROCESS_OUTPUT_DRAIN: Duration = Duration::from_secs(1);
/// How long processes may take to exit after SIGKILL.
pub const PROCESS_KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// How often processes are killed that a handler starts after the deadline of a cancellation.
pub const PROCESS_KILL_INTERVAL: Duration = Duration::from_secs(1);
/// A status without the memory of its tasks is better than none: reading a process may wait for it.
pub const STATUS_MEMORY_TIMEOUT: Duration = Duration::from_secs(2);
pub const PROCESSES_LISTED_MAX: usize = 20;
/// A payload is killed this long before the cancellation deadline, so that its end is seen in time.
pub const PROCESS_KILL_MARGIN: Duration = Duration::from_secs(2);
pub const PROCESS_READ_BYTES: usize = 16 << 10;
/// How much of a process's environment is searched for the cookie of its claim.
pub const PROCESS_ENVIRONMENT_BYTES_MAX: u64 = 4 << 20;
/// Parents of a process that are followed to find out whether it descends from the worker.
pub const DESCENT_DEPTH_MAX: usize = 1_000;
pub const DESCENT_ATTEMPTS_MAX: usize = 5;
pub const TASK_MOUNTS_MAX: usize = 4096;
pub const CGROUPS_NESTED_MAX: usize = 10_000;
pub const CONTAINMENT_PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Consecutive scans for a claim's orphans when one exits during a scan.
pub const ORPHAN_SCANS_MAX: usize = 20;
/// Zombies count towards the process limit of a task.
pub const REAP_INTERVAL: Duration = Duration::from_millis(20);
/// How long the exec shim may take to execute the payload; usually milliseconds.
pub const PROCESS_START_TIMEOUT: Duration = Duration::from_secs(30);
/// The end of the exec shim's output that is kept.
pub const SHIM_MESSAGE_BYTES_MAX: usize = 4 << 10;
/// After this long, processes that survive `cgroup.kill` are killed one by one.
pub const CGROUP_KILL_EACH_DELAY: Duration = Duration::from_millis(200);
pub const CGROUP_KILL_INTERVAL: Duration = Duration::from_secs(1);
pub const LOCK_ATTEMPTS_MAX: u32 = 100;
pub const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// Attempts to remove a task directory while a process still writes to it.
pub const FOLDER_REMOVALS_MAX: usize = 5;
/// Task directories that could not be removed and were moved aside.
pub const LEFTOVER_FOLDERS_MAX: usize = 1_000;
pub const DISK_USAGE_INTERVAL: Duration = Duration::from_secs(5);
pub const PROGRAM_CHECK_TIMEOUT: Duration = Duration::from_secs(60);
/// Tasks of one worker whose work runs elsewhere.
pub const LAUNCHED_MAX: u32 = 100_000;
/// The limit of such tasks unless `worker.launched_max` is set.
pub const LAUNCHED_DEFAULT: u32 = 1_000;
pub const LAUNCHED_EVENTS_MAX: usize = 64;
/// A wait of work that was not launched yet for which a message is scheduled. During a shorter one it keeps its claim.
pub const STAGED_DEFER_WAIT_MIN: Duration = Duration::from_secs(5);

/// A call of work that is launched elsewhere. One that takes longer counts as not answered.
pub const STAGED_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts to remove what an ended task has left elsewhere: an API server may be away for some minutes.
pub const WORK_DISCARD_ATTEMPTS_MAX: u32 = 12;
/// For such removals at the exit. The next process goes on with the others.
pub const WORK_DISCARD_EXIT_TIMEOUT: Duration = Duration::from_secs(5);
pub const STAGED_CHECK_IN_SECONDS_MAX: f64 = 86_400.0;
pub const STAGED_HANDLE_BYTES_MAX: usize = 4 << 10;
pub const PROGRAM_LINE_BYTES_MAX: usize = 64 << 10;
/// Ignored lines of descriptor 3 that a task's log names.
pub const PROGRAM_IGNORED_NOTES_MAX: usize = 20;
pub const PROGRAM_REASONS_MAX: usize = 20;
/// How long a worker that aborts may take before the process exits anyway.
pub const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
pub const DEMO_TASKS_TIMEOUT: Duration = Duration::from_secs(120);
pub const DEMO_POLL_INTERVAL: Duration = Duration::from_millis(150);
/// The metadata service is on the host itself.
pub const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
pub const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// A list of events for a whole scale set.
pub const METADATA_BODY_BYTES_MAX: usize = 256 << 10;
/// AWS recommends 5 s.
pub const NOTICE_POLL_INTERVAL_AWS: Duration = Duration::from_secs(5);
/// Azure recommends 1 s; Google's service holds the call, as a rule.
pub const NOTICE_POLL_INTERVAL: Duration = Duration::from_secs(1);
pub const NOTICE_LONG_POLL_WAIT: Duration = Duration::from_secs(30);
pub const NOTICE_TOKEN_TTL: Duration = Duration::from_secs(60);
pub const NOTICE_FILE_BYTES_MAX: u64 = 256;
pub const NOTICE_MARGIN: Duration = Duration::from_secs(15);
pub const POLL_INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Zero turns the poll off.
pub const STATUS_POLL_MIN_MS: u64 = 100;
/// Payloads specify their run time in seconds.
pub const RUN_TIME_MIN_MS: u64 = 1_000;
/// A shorter claim leaves no time after its margin.
pub const CLAIM_TIMEOUT_MIN_MS: u64 = 1_000;
/// The marker between head and tail, and a few lines.
pub const TASK_LOG_BYTES_MIN: u64 = 1 << 10;
pub const HOST_PROBE_BYTES: usize = 64 << 10;
/// What one task opens with its pipes.
pub const HOST_PROBE_FILES: usize = 16;
pub const HOST_PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// Most handlers only wait for processes.
pub const HANDLER_THREADS_MAX: usize = 16;
/// How long an exiting worker waits for its handlers to be dropped.
pub const HANDLERS_DROP_TIMEOUT: Duration = Duration::from_secs(1);
pub const SOURCES_CLOSE_TIMEOUT: Duration = Duration::from_secs(15);
pub const HOST_RESOURCES_INTERVAL: Duration = Duration::from_secs(10);
/// How long an idle thread for blocking work is kept. A measurement each [`HOST_RESOURCES_INTERVAL`] uses one; the runtime of handlers
/// has no work that is as regular.
pub const BLOCKING_THREAD_IDLE_MAX: Duration = Duration::from_secs(3_600);
/// How often the number of requests that ended is logged.
pub const REQUEST_SUMMARY_INTERVAL: Duration = Duration::from_secs(1);
pub const PROGRESS_CHARS_MAX: usize = 200;
pub const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(250);
pub const RUNNER_LINE_BYTES_MAX: u64 = 1 << 20;
pub const RUNNER_LINES_MAX: usize = 16;
/// A file that the worker-runner writes for its worker.
pub const RUNNER_FILE_BYTES_MAX: u64 = 16 << 20;
pub const DOCTOR_CHECK_TIMEOUT: Duration = Duration::from_secs(40);
pub const DOCTOR_STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// How often an idle worker asks whether it is in quarantine.
pub const QUARANTINE_CHECK_INTERVAL: Duration = Duration::from_secs(300);
pub const DOCTOR_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Descriptors of a worker without tasks: connections, sockets, pipes of threads.
pub const WORKER_OPEN_FILES: u64 = 128;
/// A worker with fewer descriptors does not start: it could not answer its control socket.
pub const WORKER_OPEN_FILES_MIN: u64 = 64;
/// Descriptors of a task: its pipes, its log, its uploads and their connections.
pub const TASK_OPEN_FILES: u64 = 16;
/// Further lines of the worker's own log are dropped and counted.
pub const LOG_LINES_QUEUED_MAX: usize = 8_192;
/// Lines of the log in one request to a collector.
pub const LOG_LINES_SENT_MAX: usize = 512;
pub const LOG_WRITE_BYTES: usize = 64 * 1024;
/// Further alerts are not reported to the manager of the worker pool.
pub const ALERTS_QUEUED_MAX: usize = 16;
/// Less than the time that systemd waits for the start of a service.
pub const POOL_REGISTRATION_TIMEOUT: Duration = Duration::from_secs(60);
/// How long the first claim waits for the answer whether the worker is needed.
pub const POOL_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
pub const RUNNER_SEND_TIMEOUT: Duration = Duration::from_secs(2);
pub const RUNNER_WELCOME_TIMEOUT: Duration = Duration::from_secs(5);
/// The journal is compacted long before it is this large.
pub const JOURNAL_BYTES_MAX: u64 = 64 << 20;
/// The journal is rewritten when more waits for the disk: thousands of claims.
pub const JOURNAL_PENDING_BYTES_MAX: usize = 1 << 20;
/// The host counts as unhealthy when a claim waits longer for its record.
pub const JOURNAL_WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a poll waits for its record.
pub const JOURNAL_POLL_TIMEOUT: Duration = Duration::from_secs(1);
pub const JOURNAL_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
pub const REDACT_READ_BYTES: usize = 256 * 1024;
/// A larger body is passed to the handler as text only.
pub const REQUEST_JSON_BYTES_MAX: usize = 1 << 20;
/// How often a running task is reported when nothing changes.
pub const ACTIVITY_REPEAT_INTERVAL: Duration = Duration::from_secs(60);
pub const REPLIES_QUEUED_MAX: usize = 256;
/// A container's name is a host name too.
pub const CONTAINER_NAME_BYTES_MAX: usize = 63;
/// Pod names are host names and are 17 characters longer.
pub const DEPLOYMENT_NAME_BYTES_MAX: usize = 46;
/// The names of other Kubernetes objects, and of labels.
pub const OBJECT_NAME_BYTES_MAX: usize = 63;
/// Files and directories of a unit add up to 15 characters.
pub const UNIT_NAME_BYTES_MAX: usize = 240;
/// Attempts of a download without a byte more: about three minutes.
pub const DOWNLOAD_ATTEMPTS_MAX: u32 = 9;
/// Redirects that are followed to mounted content.
pub const DOWNLOAD_HOPS_MAX: u8 = 10;
pub const DOWNLOAD_STALL_MAX: Duration = Duration::from_secs(60);
pub const DOWNLOAD_PROGRESS_INTERVAL: Duration = Duration::from_secs(10);
pub const DOWNLOAD_WRITE_BYTES: usize = 1 << 20;
/// How often room is made for a download whose size the server does not say.
pub const DOWNLOAD_ROOM_BYTES: u64 = 256 << 20;
/// One removal of a container. A daemon that is busy takes seconds.
pub const OUTSIDE_REMOVE_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the removal of a container that failed is repeated.
pub const OUTSIDE_REMOVE_INTERVAL: Duration = Duration::from_millis(500);
/// Intervals between removals of a container whose daemon does not answer.
pub const OUTSIDE_REMOVE_BACKOFF_MAX: u32 = 20;
/// Attempts of a removal before the slot is closed, or a worker does not start. Podman needs two after its monitor was killed.
pub const OUTSIDE_REMOVE_ATTEMPTS_MAX: u32 = 4;
/// A question to the daemon of containers.
pub const CONTAINER_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Copying one artifact out of a container.
pub const CONTAINER_COPY_TIMEOUT: Duration = Duration::from_secs(30 * 60);
pub const CONTAINER_PATH_BYTES_MAX: usize = 4095;
pub const IMAGE_NAME_BYTES_MAX: usize = 512;
pub const UNPACK_ENTRIES_MAX: u64 = 4_000_000;
pub const PURGE_REQUESTS_TIMEOUT: Duration = Duration::from_secs(10);
/// How far the clocks of the worker and of the service that purges caches may differ; generic-worker allows as much.
pub const PURGE_CLOCK_SKEW_MAX: Duration = Duration::from_secs(300);
/// Connections of one task to its proxy.
pub const PROXY_CONNECTIONS_MAX: usize = 64;
pub const PROXY_BEWIT_BYTES_MAX: usize = 64 << 10;
/// How long a URL that a task's proxy has signed is valid, as with generic-worker.
pub const BEWIT_LIFETIME: Duration = Duration::from_secs(3600);
/// How long a task waits for a user while the files of the task before it are removed.
pub const USER_WAIT_MAX: Duration = Duration::from_secs(60);
/// How deep directories may be nested that are given to another user.
pub const USER_TREE_DEPTH_MAX: usize = 256;
