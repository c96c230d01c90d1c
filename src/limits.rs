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
/// Content up to this many bytes is sent from memory in one piece.
pub const ARTIFACT_WHOLE_BYTES_MAX: u64 = 64 << 10;
/// The slowest upload that is waited for, on top of [`CALL_TIMEOUT`].
pub const ARTIFACT_BYTES_PER_SECOND_MIN: u64 = 128 << 10;
/// The longest an artifact may be on its way; Taskcluster's upload URLs live 45 minutes.
pub const ARTIFACT_TRANSFER_TIMEOUT_MAX: Duration = Duration::from_secs(45 * 60);
/// How often an artifact may lead on before its content is reached: a link, a reference, a bucket.
pub const ARTIFACT_HOPS_MAX: u8 = 4;
/// The largest artifact that a queue in memory keeps.
pub const MEMORY_ARTIFACT_BYTES_MAX: usize = 64 << 20;

/// How many bytes of a task's log are kept from its start.
pub const LOG_HEAD_BYTES: u64 = 48 << 20;
/// How many bytes of a task's log are kept from its end.
pub const LOG_TAIL_BYTES: u64 = 16 << 20;
/// The longest log that is finished without another thread's help.
pub const LOG_FINISH_BYTES_INLINE: u64 = 64 << 10;
/// The longest line that the worker itself writes into a task's log.
pub const LOG_NOTE_BYTES_MAX: usize = 4 << 10;
/// The shortest secret that is looked for in logs, in characters.
pub const REDACT_SECRET_CHARS_MIN: usize = 6;
/// The longest text that is looked for in one piece. Less than that, or than a shape needs, is held back of a log at a time.
pub const REDACT_NEEDLE_BYTES_MAX: usize = 4 << 10;
/// How many bytes a shape is recognised from at most: a token's header, a URL's user and password.
pub const REDACT_SHAPE_BYTES_MAX: usize = 1 << 10;
/// The longest private key; a block without an end is hidden for as long. RSA with 8192 bits takes 6.4 KiB.
pub const REDACT_KEY_BLOCK_BYTES_MAX: usize = 8 << 10;
/// The largest bitmap of what secrets start with.
pub const REDACT_BITMAP_BITS_MAX: usize = 1 << 22;
/// How many bytes the secrets that a task adds may have, with all their variants.
pub const REDACT_TASK_BYTES_MAX: usize = 1 << 20;
/// How long bytes of a task's log that may be the beginning of a secret are held back while nothing follows them.
pub const REDACT_IDLE: Duration = Duration::from_secs(1);

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
/// How long a secret may take to come from a descriptor.
pub const SECRET_WAIT: Duration = Duration::from_secs(30);
/// How many problems of one configuration are shown.
pub const CONFIG_PROBLEMS_MAX: usize = 20;
/// How deep tables and lists of a configuration may nest.
pub const CONFIG_DEPTH_MAX: usize = 16;
/// How many artifacts of a task are uploaded at once.
pub const UPLOADS_AT_ONCE: usize = 8;
/// How long an upload without a definite answer is tried again; the lease is extended meanwhile.
pub const UPLOAD_PATIENCE: Duration = Duration::from_secs(10 * 60);
/// How long a handler may take beyond the end of a payload's grace before it is dropped.
pub const KILL_SLACK: Duration = crate::domain::lease::KILL_SLACK;
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
/// How much of a process's environment is searched for whose it is.
pub const PROCESS_ENVIRONMENT_BYTES_MAX: u64 = 4 << 20;
/// How many folders, and how many log files, of tasks that have ended are kept for the next ones; never more than tasks run
/// at once.
pub const SPARES_MAX: usize = 64;
/// How large a log may have been whose file is kept.
pub const SPARE_LOG_BYTES_MAX: u64 = 64 << 10;
/// How many control groups below a claim's own are looked into.
pub const CGROUPS_NESTED_MAX: usize = 10_000;
/// How long a control group may take to be frozen before its processes are killed as they are.
pub const CGROUP_FROZEN_WAIT: Duration = Duration::from_secs(1);
/// How long each step of finding out about the host's control groups may take.
pub const CONTAINMENT_PROBE_WAIT: Duration = Duration::from_secs(5);
/// How often orphans that have ended are reaped at most.
pub const REAP_EVERY: Duration = Duration::from_millis(100);
/// How long a payload's forerunner may take to become the payload. It is milliseconds, unless the host is in trouble.
pub const PROCESS_START_WAIT: Duration = Duration::from_secs(30);
/// How much of what a payload's forerunner says is kept: the last of it.
pub const SHIM_WORD_BYTES_MAX: usize = 4 << 10;
/// How often a control group that is not empty yet is killed again.
pub const CGROUP_KILL_AGAIN: Duration = Duration::from_secs(1);
/// How many times a lock that another process has is tried.
pub const LOCK_TRIES: u32 = 25;
/// How long from one try to the next.
pub const LOCK_AGAIN: Duration = Duration::from_millis(20);
/// How many times a task's folder is removed before it is left where it is: something may still write into it.
pub const FOLDER_REMOVALS_MAX: usize = 5;
/// How many folders that could not be removed are kept beside the work folder's tasks.
pub const FOLDERS_LEFT_MAX: usize = 1_000;
/// How often a task's folder is measured where its size is limited.
pub const DISK_LOOK_EVERY: Duration = Duration::from_secs(5);
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
/// How many runs a task of the embedded queue may have.
pub const QUEUE_RUNS_MAX: usize = 50;
/// How far into the future a deadline may lie.
pub const QUEUE_DEADLINE_MAX: Duration = Duration::from_secs(5 * 24 * 3600);
/// How far the clocks of the embedded queue and its callers may differ.
pub const QUEUE_DRIFT: Duration = Duration::from_secs(15 * 60);
/// How far out of its time a certificate is still accepted.
pub const QUEUE_CERTIFICATE_DRIFT: Duration = Duration::from_secs(5 * 60);
/// How long a certificate may last.
pub const QUEUE_CERTIFICATE_LIFE_MAX: Duration = Duration::from_secs(31 * 24 * 3600);
/// How many tasks one task may depend on.
pub const QUEUE_DEPENDENCIES_MAX: usize = 1_000;
/// How long a claim lasts, unless configured.
pub const QUEUE_CLAIM_TIMEOUT: Duration = Duration::from_secs(1200);
/// How long after its end a claim is resolved, unless configured.
pub const QUEUE_CLAIM_DELAY: Duration = Duration::from_secs(5);
/// How long after its deadline a task is resolved, unless configured.
pub const QUEUE_DEADLINE_DELAY: Duration = Duration::from_secs(5);
/// How long signed poll URLs are accepted, unless configured.
pub const QUEUE_POLL_URL_LIFE: Duration = Duration::from_secs(30 * 60);
/// The shortest life of signed poll URLs.
pub const QUEUE_POLL_URL_LIFE_MIN: Duration = Duration::from_secs(1);
/// The shortest that messages may be hidden; the storage service counts in seconds.
pub const QUEUE_VISIBILITY_MIN: Duration = Duration::from_secs(1);
/// How long a received message is hidden, unless configured.
pub const QUEUE_VISIBILITY: Duration = Duration::from_secs(300);
/// The longest that a message may be hidden.
pub const QUEUE_VISIBILITY_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long a request for work is held while there is none.
pub const QUEUE_LONG_POLL: Duration = Duration::from_secs(20);
/// How many requests for work are held at once.
pub const QUEUE_LONG_POLLS_MAX: usize = 4_096;
/// How many requests for work may wait in one task queue.
pub const QUEUE_WAITERS_MAX: usize = 4_096;
/// How many connections the embedded queue serves at once.
pub const QUEUE_CONNECTIONS_MAX: usize = 8_192;
/// How long a connection to the embedded queue may stay without a byte moving.
pub const QUEUE_IDLE_MAX: Duration = Duration::from_secs(90);
/// How many connections may be open whose caller has not proved itself.
pub const QUEUE_STRANGERS_MAX: usize = 64;
/// How long a connection may stay open whose caller does not prove itself; longer than a request for work is held.
pub const QUEUE_STRANGER_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the next connection waits for a stranger to go before all of them are told to.
pub const QUEUE_CROWD_PATIENCE: Duration = Duration::from_secs(1);
/// How long to wait before the next attempt to accept a connection.
pub const QUEUE_ACCEPT_REST: Duration = Duration::from_millis(100);
/// The largest head of a request; a certificate with its scopes is in it.
pub const QUEUE_HEAD_BYTES_MAX: usize = 32 << 10;
/// How many headers a request may have.
pub const QUEUE_HEAD_LINES_MAX: usize = 100;
/// How much of a connection is read ahead.
pub const QUEUE_BUFFER_BYTES_MAX: usize = QUEUE_HEAD_BYTES_MAX;
/// The largest body of most calls.
pub const QUEUE_SMALL_BODY_BYTES_MAX: usize = 64 << 10;
/// The largest body of a caller who has not proved itself.
pub const QUEUE_STRANGER_BODY_BYTES_MAX: usize = 16 << 10;
/// The largest body of a call that carries an object, in base64.
pub const QUEUE_INLINE_BODY_BYTES_MAX: usize = 2 << 20;
/// How many bytes of bodies are held at once; who comes with more is told to try again.
pub const QUEUE_BODIES_BYTES_MAX: usize = 64 << 20;
/// How much of a refused body is read on, so that its sender reads the refusal.
pub const QUEUE_DISCARD_BYTES_MAX: usize = 16 << 20;
/// How long a refused body is read on.
pub const QUEUE_DISCARD_TIMEOUT: Duration = Duration::from_secs(1);
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
pub const QUEUE_SWEEP_EVERY: Duration = Duration::from_secs(600);
/// How long the embedded queue may go without looking at its clock.
pub const QUEUE_LOOK_EVERY: Duration = Duration::from_secs(30);
/// The shortest rest between two attempts at what is due.
pub const QUEUE_REST_MIN: Duration = Duration::from_millis(10);
/// The longest rest after failures of the queue's file; each failure doubles the rest.
pub const QUEUE_REST_MAX: Duration = Duration::from_secs(30);
/// How many entries a page of a listing has at most.
pub const QUEUE_PAGE_MAX: usize = 1_000;
/// How many bytes of definitions an answer holds, one task in any case; a worker reads [`JSON_BODY_BYTES_MAX`].
pub const QUEUE_REPLY_BYTES_MAX: usize = 12 << 20;
/// How many workers the embedded queue remembers.
pub const QUEUE_WORKERS_MAX: usize = 10_000;
/// How many of a worker's latest claims are remembered.
pub const QUEUE_WORKER_TASKS_MAX: usize = 20;
/// How long the embedded queue waits for calls under way when it is stopped.
pub const QUEUE_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// How long after an exception artifacts of the run are still taken.
pub const QUEUE_LATE_ARTIFACTS: Duration = Duration::from_secs(25 * 60);
/// How long the address that an artifact is put to is accepted.
pub const QUEUE_PUT_URL_LIFE: Duration = Duration::from_secs(45 * 60);
/// How long the address that an artifact is got from is accepted.
pub const QUEUE_GET_URL_LIFE: Duration = Duration::from_secs(30 * 60);
/// The largest object that may come within a call.
pub const QUEUE_INLINE_BYTES_MAX: usize = 1 << 20;
/// How long the next piece of an artifact may take to come.
pub const QUEUE_CHUNK_TIMEOUT: Duration = Duration::from_secs(60);
/// How long an artifact may take to come, all in all; its address lives no longer.
pub const QUEUE_UPLOAD_TIMEOUT: Duration = QUEUE_PUT_URL_LIFE;
/// How much of a stored artifact is read at a time.
pub const QUEUE_READ_BYTES: usize = 64 << 10;
/// How long a request for work is held while too many others already are.
pub const QUEUE_CROWDED_POLL: Duration = Duration::from_secs(1);
/// How long a worker that was told to end at once may take before the process ends anyway.
pub const ABORT_WAIT: Duration = Duration::from_secs(5);
/// How long the tasks of `journeyman dev --demo` may take, all together.
pub const DEMO_TIME_MAX: Duration = Duration::from_secs(120);
/// How long a call of the demo may take; a cold one starts a worker.
pub const DEMO_CALL_MAX: Duration = Duration::from_secs(60);
/// How long the workers of the demo may take to end.
pub const DEMO_LEAVE_MAX: Duration = Duration::from_secs(15);
/// How often the demo looks at its tasks.
pub const DEMO_REDRAW: Duration = Duration::from_millis(150);
/// How much of a log the demo reads.
pub const DEMO_LOG_BYTES_MAX: usize = 4 << 20;
/// How long making a connection to a metadata service may take; it is on this very host.
pub const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a metadata service may take to answer a call that it does not hold.
pub const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest answer of a metadata service that is read: a list of events for a whole scale set.
pub const METADATA_BODY_BYTES_MAX: usize = 256 << 10;
/// How often EC2's metadata service is asked for a notice; what AWS recommends.
pub const NOTICE_PACE_AWS: Duration = Duration::from_secs(5);
/// How often Google's metadata service is asked where it does not hold the call.
pub const NOTICE_PACE_GCP: Duration = Duration::from_secs(1);
/// How often Azure's metadata service is asked for events; what Azure recommends.
pub const NOTICE_PACE_AZURE: Duration = Duration::from_secs(1);
/// How often the notice file is looked at.
pub const NOTICE_FILE_PACE: Duration = Duration::from_secs(1);
/// How long Google's metadata service is asked to hold a call.
pub const NOTICE_CHANGE_WAIT: Duration = Duration::from_secs(30);
/// How long a token of EC2's metadata service is asked to live; its longest.
pub const NOTICE_TOKEN_LIFE: Duration = Duration::from_secs(6 * 60 * 60);
/// How many of Azure's events are heeded.
pub const NOTICE_EVENTS_MAX: usize = 100;
/// How much of the notice file is read.
pub const NOTICE_FILE_BYTES_MAX: u64 = 256;
/// How long before the host goes running tasks are handed back, unless configured.
pub const NOTICE_MARGIN: Duration = Duration::from_secs(15);
/// The shortest sleep between polls that may be set.
pub const POLL_INTERVAL_MIN: Duration = Duration::from_millis(50);
/// The shortest time between two questions after a running task that may be set; zero is off.
pub const STATUS_POLL_MIN: Duration = Duration::from_millis(100);
/// The shortest run time that may be set; payloads count theirs in seconds.
pub const RUN_TIME_MIN: Duration = Duration::from_secs(1);
/// The shortest claim that may be set; of a shorter one nothing is left once its margin is taken off.
pub const CLAIM_TIMEOUT_MIN: Duration = Duration::from_secs(1);
/// The least of a task's log that may be kept: the marker between head and tail and a few lines.
pub const TASK_LOG_BYTES_MIN: u64 = 1 << 10;
/// How much is written when the host is looked at.
pub const HOST_LOOK_BYTES: usize = 64 << 10;
/// How many files are opened at once when the host is looked at; what one task takes with its pipes.
pub const HOST_LOOK_FILES: usize = 16;
/// How long a look at the host may take before its disk counts as unfit.
pub const HOST_LOOK_TIME: Duration = Duration::from_secs(10);
/// The most threads that run handlers, unless set. What they run is processes, which have their own.
pub const HANDLER_THREADS_MAX: usize = 16;
/// How long a worker that exits waits for its handlers to be dropped, and their processes with them.
pub const HANDLERS_DROP_WAIT: Duration = Duration::from_secs(1);
/// How long a worker that exits waits for an orderly goodbye to its sources, all at once.
pub const SOURCES_CLOSE_WAIT: Duration = Duration::from_secs(15);
/// How often the worker looks what its host has left.
pub const ROOM_EVERY: Duration = Duration::from_secs(10);
/// How much of what a task says of its progress is kept.
pub const PROGRESS_CHARS_MAX: usize = 200;
/// How long a worker may take to answer its control socket.
pub const CONTROL_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest request that a control socket takes.
pub const CONTROL_BODY_BYTES_MAX: usize = 64 << 10;
/// How much of a task's log is read at a time for somebody who follows it.
pub const CONTROL_READ_BYTES: usize = 64 << 10;
/// How often it is checked that a task whose log is followed is still there.
pub const CONTROL_FOLLOW_CHECK: Duration = Duration::from_secs(1);
/// The largest answer of a control socket, logs aside.
pub const CONTROL_ANSWER_BYTES_MAX: usize = 64 << 20;
/// How often a command that waits for a worker to be gone, or a task, looks.
pub const DRAIN_WAIT_EVERY: Duration = Duration::from_millis(250);
/// How many words to a service manager may wait for it to read.
pub const MANAGER_MESSAGES_MAX: usize = 16;
/// The longest status that a service manager is told.
pub const MANAGER_STATUS_CHARS_MAX: usize = 400;
/// How often a worker is looked at on behalf of a service manager.
pub const MANAGER_LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long its loop may take to answer, a quarter of the watchdog's span where that is less.
pub const MANAGER_LOOK_WAIT: Duration = Duration::from_secs(5);
/// How often a status is told in which only a span has run down.
pub const MANAGER_STATUS_EVERY: Duration = Duration::from_secs(10);
/// How often a service manager is asked for more time while a worker drains.
pub const MANAGER_EXTEND_EVERY: Duration = Duration::from_secs(10);
/// How much more time it is asked for.
pub const MANAGER_EXTEND_BY: Duration = Duration::from_secs(60);
/// How long the last words to a service manager may take.
pub const MANAGER_CLOSE_WAIT: Duration = Duration::from_secs(1);
/// The longest line that a worker-runner may send.
pub const RUNNER_LINE_BYTES_MAX: u64 = 1 << 20;
/// How many lines of a worker-runner may wait.
pub const RUNNER_LINES_MAX: usize = 16;
/// The largest file that a worker-runner may write for its worker.
pub const RUNNER_FILE_BYTES_MAX: u64 = 16 << 20;
/// The shortest time that a request in the queue of a worker group may wait for a worker.
pub const MESSAGE_TTL_MIN: Duration = Duration::from_millis(1);
/// The longest; RabbitMQ takes no more milliseconds.
pub const MESSAGE_TTL_MAX: Duration = Duration::from_millis(u32::MAX as u64);
/// How long `journeyman doctor` looks at one source, or at the host, at most.
pub const DOCTOR_TIME: Duration = Duration::from_secs(40);
/// How long it waits for a name, or for a connection.
pub const DOCTOR_STEP_TIME: Duration = Duration::from_secs(5);
/// How long it waits for an answer of a service.
pub const DOCTOR_CALL_TIME: Duration = Duration::from_secs(10);
/// With fewer free inodes than this it warns: one checkout of a large project takes more.
pub const DOCTOR_INODES_LEAST: u64 = 100_000;
/// How many descriptors a worker takes without tasks: connections, sockets, threads' pipes.
pub const FILES_OF_A_WORKER: u64 = 128;
/// How many descriptors a task may take: its pipes, its log, its uploads and their connections.
pub const FILES_OF_A_TASK: u64 = 16;

/// How long the worker's loop may take to answer before it does not count as alive, or the page goes without.
pub const HTTP_LOOK_TIMEOUT: Duration = Duration::from_secs(5);
/// How many groups of a pool a controller's page shows; a browser redraws them every two seconds.
pub const PAGE_GROUPS_MAX: usize = 200;
/// How many connections the status page and the metrics are served over at once; beyond, one that asks for nothing makes room.
pub const HTTP_CONNECTIONS_MAX: usize = 32;
/// How long a connection of the status page may last; browsers and Prometheus make another.
pub const HTTP_CONNECTION_MAX: Duration = Duration::from_secs(60);
/// How long the head of a request for the status page may take to come.
pub const HTTP_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long what is posted to a controller may take to come.
pub const HTTP_BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest head of a request for the status page.
pub const HTTP_HEAD_BYTES_MAX: usize = 16 << 10;
/// How long to wait before the next attempt to accept a connection of the status page.
pub const HTTP_ACCEPT_REST: Duration = Duration::from_millis(100);
/// How often `journeyman top` looks at a worker.
pub const TOP_EVERY: Duration = Duration::from_secs(1);
/// How many keys may wait for `journeyman top`.
pub const TOP_KEYS_MAX: usize = 64;
/// How long `journeyman top` waits for a key before it looks whether it is still wanted.
pub const TOP_KEYS_WAIT: Duration = Duration::from_millis(100);
/// How many lines of a log `journeyman top` keeps.
pub const TOP_LOG_LINES_MAX: usize = 2_000;
/// How many bytes of a line of a log `journeyman top` keeps.
pub const TOP_LOG_LINE_BYTES_MAX: usize = 1_000;
/// How many lines of the worker's own log may wait for whoever reads it; the next ones are dropped and counted.
pub const LOG_LINES_WAITING_MAX: usize = 8_192;
/// How many bytes of it are written at once at most, whole lines that came together.
pub const LOG_WRITE_BYTES: usize = 64 * 1024;
/// How long after a write the next lines are gathered.
pub const LOG_GATHER: Duration = Duration::from_millis(2);
/// How long a word to the worker-runner may take to be written.
pub const RUNNER_SAY_TIMEOUT: Duration = Duration::from_secs(2);
/// How many connections a control socket serves at once; the others wait.
pub const CONTROL_CONNECTIONS_MAX: usize = 32;
/// How long the head of a request to a control socket may take, and how long a connection may be silent between two.
pub const CONTROL_HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// The rest after a connection to a control socket could not be accepted.
pub const CONTROL_ACCEPT_REST: Duration = Duration::from_millis(100);
/// How much of a journal is read at a start. Written anew long before it is that large, it cannot be.
pub const JOURNAL_BYTES_MAX: u64 = 64 << 20;
/// How much may wait for the disk before a journal is written anew instead: thousands of claims.
pub const JOURNAL_PENDING_BYTES_MAX: usize = 1 << 20;
/// How long a claim waits for its record before the host counts as unfit.
pub const JOURNAL_WAIT: Duration = Duration::from_secs(10);
/// How long a poll that claims waits until its record would outlive the worker.
pub const JOURNAL_POLL_WAIT: Duration = Duration::from_secs(1);
/// How long a worker that exits waits for its journal; what is not written then is asked for at the next start.
pub const JOURNAL_LAST_WAIT: Duration = Duration::from_secs(1);

/// How many ended claims wait for a collector of traces; what comes on top is dropped and counted.
pub const TRACES_WAITING_MAX: usize = 2048;
/// How many claims go into one request to a collector.
pub const TRACES_BATCH_MAX: usize = 128;
/// How long a span waits for others at most.
pub const TRACES_EVERY: Duration = Duration::from_secs(5);
/// How often spans are sent in all before they are dropped.
pub const TRACES_TRIES: u32 = 4;
/// How long a collector may take to answer, where the environment does not say.
pub const TRACES_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that the environment may say.
pub const TRACES_TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// How long a worker that leaves waits for a collector.
pub const TRACES_CLOSE_WAIT: Duration = Duration::from_secs(2);
/// How much of a collector's answer is read.
pub const TRACES_ANSWER_BYTES_MAX: usize = 64 * 1024;

/// How much of an artifact that is a log is looked at in one piece.
pub const CLEANSE_BYTES: usize = 256 * 1024;
/// How long a connection to an AMQP broker may take, TLS and login included.
pub const AMQP_CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// How often each side of an AMQP connection shows that it is there, in seconds, where the address does not say.
pub const AMQP_HEARTBEAT: u16 = 30;
/// The largest body of a request that is read as JSON for its handler; a larger one is handed on as text.
pub const REQUEST_JSON_BYTES_MAX: usize = 1 << 20;
/// How long a poll of a request queue waits.
pub const AMQP_POLL_HOLD: Duration = Duration::from_secs(20);
/// How long a request may be worked at between two looks whether its channel still stands.
pub const AMQP_LEASE: Duration = Duration::from_secs(600);
/// How long requests that were handed to this worker may wait for a poll before they go back to the others.
pub const AMQP_UNPOLLED_MAX: Duration = Duration::from_secs(2);
/// How long a call to a broker may take besides a connection.
pub const AMQP_CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a step of an orderly goodbye to a broker may take.
pub const AMQP_CLOSE_WAIT: Duration = Duration::from_secs(5);
/// The largest message that is taken or sent, unless configured: RabbitMQ's own bound before 4.0.
pub const AMQP_MESSAGE_BYTES_MAX: u64 = 128 << 20;
/// How long a client takes an exchange for granted that it has seen.
pub const EXCHANGE_KNOWN: Duration = Duration::from_secs(1);
/// How long a request rests that a service was too busy for, unless it says how long.
pub const SERVICE_REST: Duration = Duration::from_secs(1);
/// The longest of such rests, whatever a service says.
pub const SERVICE_REST_MAX: Duration = Duration::from_secs(30);
/// The longest name that AMQP has room for: of a queue, an exchange, a key, a header, a media type.
pub const AMQP_NAME_BYTES_MAX: usize = 255;
/// How often a request is tried, unless configured.
pub const AMQP_ATTEMPTS_MAX: u32 = 5;
/// How often a channel is looked at that is consumed from no more while requests of it are worked at.
pub const AMQP_CHANNEL_LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long an answer is sent again that its queue refuses, since that is full.
pub const AMQP_REFUSED_MAX: Duration = Duration::from_secs(60);
/// For how long it counts that the queue of requests has refused a copy.
pub const AMQP_FULL_FRESH: Duration = Duration::from_secs(60);
/// The pause before such an answer is sent again to a request that no handler has seen.
pub const AMQP_REFUSED_REST: Duration = Duration::from_secs(1);
/// How often an alert says that requests were acknowledged without an answer.
pub const AMQP_UNANSWERED_SAID_EVERY: Duration = Duration::from_secs(60);
/// The shortest time between two reports of a task that goes on that may be set.
pub const ACTIVITY_REPEAT_MIN: Duration = Duration::from_secs(2);
/// How many clients may be asked after at once, whether they still wait for their answers: an address that is nobody's costs the channel
/// that it is asked for on.
pub const AMQP_CLIENTS_ASKED_MAX: usize = 1;
/// How long a client that was there is taken to be there still.
pub const AMQP_CLIENT_ASKED_EVERY: Duration = Duration::from_secs(1);
/// How many such clients are remembered.
pub const AMQP_CLIENTS_SEEN_MAX: usize = 64;
/// How many calls of one client may be under way at once; more wait.
pub const CALLS_MAX: usize = 16_384;
/// How many answers to one call may wait to be taken.
pub const ANSWERS_WAITING_MAX: usize = 256;
/// The largest request of a client: RabbitMQ's own bound before 4.0.
pub const CALL_BODY_BYTES_MAX: usize = 128 << 20;
/// How much of an answer's own words `journeyman call` repeats in its error.
pub const CALL_WHY_CHARS_MAX: usize = 500;
/// How much of a request's body counts for what tells requests apart; its length counts whatever it is.
pub const IDEMPOTENCY_BODY_BYTES_MAX: usize = 64 << 10;
/// The waits of a bridge between attempts at what did not go through.
pub const BRIDGE_RETRY_MIN: Duration = Duration::from_millis(500);
/// The longest of them.
pub const BRIDGE_RETRY_MAX: Duration = Duration::from_secs(30);
/// The first wait between two looks of a bridge at a task.
pub const BRIDGE_WATCH_MIN: Duration = Duration::from_millis(100);
/// The longest one.
pub const BRIDGE_WATCH_MAX: Duration = Duration::from_secs(5);
/// How long a task that was a request is kept after its deadline, for a request that comes again.
pub const BRIDGE_TASK_KEPT: Duration = Duration::from_secs(24 * 3600);
/// The largest result of a task that becomes an answer.
pub const BRIDGE_RESULT_BYTES_MAX: usize = 16 << 20;
/// How many partial answers are kept with a task.
pub const BRIDGE_PARTS_MAX: usize = 500;
/// The most that requests may have on the disk that were acknowledged before their answer, in bytes.
pub const SHELF_BYTES_MAX: u64 = 1 << 30;
/// How many of them there may be.
pub const SHELF_REQUESTS_MAX: usize = 16_384;
/// What the properties of one may have there.
pub const SHELF_HEAD_BYTES_MAX: usize = 1 << 20;
/// How long a broker's management interface may take to answer.
pub const AMQP_MANAGEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much of its answer is read.
pub const AMQP_MANAGEMENT_BYTES_MAX: usize = 1 << 20;
/// How many queues it is asked about at once.
pub const AMQP_COUNTED_PAGE: u32 = 500;
/// How many of them are counted in all.
pub const AMQP_COUNTED_MAX: u32 = 10_000;
/// How long connecting to a service beside the tasks may take; it is on this host as a rule.
pub const SERVICE_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a service is asked after that this worker has started, until it answers.
pub const SERVICE_ASK_STARTING: Duration = Duration::from_millis(100);
/// How often a service is asked after that somebody else starts, until it answers.
pub const SERVICE_ASK_ABSENT: Duration = Duration::from_secs(1);
/// The shortest time between two questions to a service, and the shortest time that it may be given to answer one.
pub const SERVICE_ASK_EVERY_MIN: Duration = Duration::from_millis(100);
/// The shortest time that a service may be given to start.
pub const SERVICE_START_WITHIN_MIN: Duration = Duration::from_millis(100);
/// How often in a row a service may not answer well before it is started again.
pub const SERVICE_MISSES_MAX: u32 = 3;
/// How long a connection to a service that broke off has to last until it counts as there.
pub const SERVICE_STAYS: Duration = Duration::from_millis(100);
/// How long a request that a service broke off waits until that is known to be on its way out.
pub const SERVICE_DOUBT_MAX: Duration = Duration::from_secs(1);
/// After how many lives in a row that did not last an operator is told of a service.
pub const SERVICE_FAILURES_SAID: u32 = 3;
/// After how many more an operator is told again; most of half an hour.
pub const SERVICE_FAILURES_SAID_EVERY: u32 = 30;
/// How much of one life of a service is kept of its log.
pub const SERVICE_LOG_BYTES_MAX: u64 = 64 << 20;
/// How much is read of what is written down of a service.
pub const SERVICE_REMAINS_BYTES_MAX: u64 = 64 << 10;
/// How long services may take to end when their worker ends. Each has a grace of its own.
pub const SERVICES_END_WAIT: Duration = Duration::from_secs(10 * 60);
/// How many headers of a request are passed on to a service.
pub const SERVICE_HEADERS_MAX: usize = 64;
/// The largest answer of a service to a task that nobody waits for; to a request it is what can be sent.
pub const SERVICE_ANSWER_BYTES_MAX: usize = 128 << 20;
/// How many orphans a controller has in hand at once.
pub const CONTROLLER_ORPHANS_MAX: u16 = 512;
/// How many of them it publishes before it waits for the broker.
pub const CONTROLLER_BATCH_MAX: usize = 128;
/// How often a request may come to the orphans before it is answered with an error.
pub const CONTROLLER_HOPS_MAX: u64 = 8;
/// How long an orphan waits for its queue before it is answered with an error; so one key does not hold up the others.
pub const CONTROLLER_ORPHAN_WAIT: Duration = Duration::from_secs(60);
/// How often in a row a queue could not be made before the orphans of its key wait for it no longer.
pub const CONTROLLER_BIND_TRIES: u32 = 5;
/// How often a controller gives an answer in a worker's place whose queue refuses it.
pub const CONTROLLER_ANSWER_TRIES: u32 = 5;
/// How long it waits before it gives it again.
pub const CONTROLLER_ANSWER_AGAIN: Duration = Duration::from_millis(500);
/// How many dead letters a controller has in hand at once.
pub const CONTROLLER_LETTERS_MAX: u16 = 256;
/// How often a controller looks after its workers and its queues.
pub const CONTROLLER_LOOK_EVERY: Duration = Duration::from_millis(500);
/// For how long after it has decided about its groups a controller gathers changes before it decides anew.
pub const CONTROLLER_PLAN_REST: Duration = Duration::from_millis(50);
/// The largest headers of a request that a controller hands on: it adds some of its own, and a broker takes no more than 128 KiB.
pub const CONTROLLER_HEADERS_BYTES_MAX: usize = 120 << 10;
/// How often a controller that stands by looks whether the other one has gone.
pub const CONTROLLER_STANDBY_LOOK: Duration = Duration::from_secs(1);
/// How many steps about queues may wait to be carried out.
pub const CONTROLLER_STEPS_MAX: usize = 4096;
/// How long a worker counts as busy after it has reported a request. One that goes on with it says so once a minute.
pub const CONTROLLER_BUSY_FOR: Duration = Duration::from_secs(90);
/// A worker that was ready for so long has lasted.
pub const CONTROLLER_STEADY: Duration = Duration::from_secs(30);
/// How many who ask for the state of a pool may wait for its controller at once.
pub const CONTROLLER_ASKS_MAX: usize = 64;
/// How many groups of one pool may be there at once.
pub const CONTROLLER_GROUPS_MAX: usize = 10_000;
/// How long a controller waits to hear which workers are there before it goes on without.
pub const CONTROLLER_MUSTER_WAIT: Duration = Duration::from_secs(5);
/// How many calls of a driver may be under way at once.
pub const DRIVER_CALLS_MAX: usize = 16;
/// How long a call of a driver may take.
pub const DRIVER_CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// How many workers may wait to be started or stopped; what exceeds it is decided anew.
pub const DRIVER_ORDERS_MAX: usize = 1024;
/// How much a driver may have to say that nobody has heard.
pub const DRIVER_NEWS_MAX: usize = 256;
/// How much of the end of a log is kept of a worker that has ended.
pub const DRIVER_LAST_WORDS_BYTES_MAX: u64 = 4096;
/// How often a driver that asks somebody else asks who is there.
pub const DRIVER_LOOK_EVERY: Duration = Duration::from_secs(2);
/// How much a driver reads of what is said to it: a list of some thousands of pods.
pub const DRIVER_OUTPUT_BYTES_MAX: usize = 64 << 20;
/// How long the output of such a program is waited for after its end, where something it has started holds it open.
pub const DRIVER_OUTPUT_WAIT: Duration = Duration::from_secs(1);
/// The longest name of a container: it is a host's name, too.
pub const CONTAINER_NAME_BYTES_MAX: usize = 63;
/// The longest name of a Deployment: those of its pods, which are names of hosts, are 17 characters longer.
pub const DEPLOYMENT_NAME_BYTES_MAX: usize = 46;
/// The longest name of another object of a cluster, and the longest label.
pub const OBJECT_NAME_BYTES_MAX: usize = 63;
/// The longest name of a unit that is made here. There may be 15 more, which files and folders of its name need.
pub const UNIT_NAME_BYTES_MAX: usize = 240;
/// How many claimed tasks of a queue of elsewhere are counted; more need no more workers than a host has.
pub const DEMAND_CLAIMED_MAX: usize = 1_000;
/// How many counts may wait to be taken in.
pub const DEMAND_COUNTS_MAX: usize = 16;
/// The shortest token that orders over HTTP may need.
pub const TOKEN_BYTES_MIN: usize = 16;
/// The longest time that an order to a controller may be for.
pub const ORDER_SPAN_MAX: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How long a request that has ended its worker waits until it is known which worker that was.
pub const CONTROLLER_DEATH_WAIT: Duration = Duration::from_secs(5);
/// How many of the last lines of a worker's log are kept with a request that it ended under.
pub const CONTROLLER_LAST_LINES_MAX: usize = 20;
/// How many requests that were put aside are looked at in one go.
pub const CONTROLLER_POISON_MAX: usize = 2_000;
/// How long that may take. One step of it may take longer, where a request is large.
pub const CONTROLLER_POISON_TIME: Duration = Duration::from_secs(10);
/// How many who want something of them may wait.
pub const CONTROLLER_WISHES_MAX: usize = 16;
/// How many reports of workers are taken in before anything else is looked at.
pub const CONTROLLER_REPORTS_MAX: usize = 128;
/// How often a controller asks the management interface what workers hold. RabbitMQ counts every five seconds.
pub const CONTROLLER_COUNT_EVERY: Duration = Duration::from_secs(2);
/// For how long such counts are good.
pub const CONTROLLER_COUNTS_FRESH: Duration = Duration::from_secs(15);
