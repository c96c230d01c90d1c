//! Every bound that has a number, in one place: those of the worker here, those of other rooms beside.

mod amqp;
mod controller;
mod operator_interfaces;
mod queue;

use std::time::Duration;

pub use amqp::*;
pub use controller::*;
pub use operator_interfaces::*;
pub use queue::*;

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
pub const PRIORITY_QUEUES_MAX: usize = 64;
/// The largest answer of a refused call that is read, to find its useful line.
pub const ERROR_BODY_BYTES_MAX: usize = 64 << 10;
/// The longest lease that is believed. Taskcluster grants 20 minutes.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 60 * 60);
/// How long before signed URLs end they are renewed, where they live long enough for that.
pub const SIGNED_URL_RENEWAL_MARGIN: Duration = Duration::from_secs(5 * 60);
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
/// How many bytes of such lines wait for the end of a line of the payload's.
pub const LOG_NOTES_PENDING_BYTES_MAX: usize = 64 << 10;
/// The shortest secret that is looked for in logs, in characters.
pub const REDACT_SECRET_CHARS_MIN: usize = 6;
/// The longest text that is looked for in one piece. Less than that, or than a shape needs, is held back of a log at a time.
pub const REDACT_PIECE_BYTES_MAX: usize = 4 << 10;
/// How many bytes a shape is recognised from at most: a token's header, a URL's user and password.
pub const REDACT_PATTERN_BYTES_MAX: usize = 1 << 10;
/// The longest private key; a block without an end is hidden for as long. RSA with 8192 bits takes 6.4 KiB.
pub const REDACT_KEY_BLOCK_BYTES_MAX: usize = 8 << 10;
/// The largest bitmap of what secrets start with.
pub const REDACT_BITMAP_BITS_MAX: usize = 1 << 22;
/// How many bytes the secrets that a task adds may have, with all their variants.
pub const REDACT_TASK_BYTES_MAX: usize = 1 << 20;
/// How long bytes of a task's log that may be the beginning of a secret are held back while nothing follows them.
pub const REDACT_HOLD_MAX: Duration = Duration::from_secs(1);
/// How many artifacts a task may declare, and how many its folders may hold in all.
pub const ARTIFACTS_MAX: usize = 10_000;
/// The largest artifact; what S3 takes in one request.
pub const ARTIFACT_BYTES_MAX: u64 = 5 << 30;
/// The longest media type of an artifact.
pub const ARTIFACT_CONTENT_TYPE_BYTES_MAX: usize = 255;
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
pub const SECRET_READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How many problems of one configuration are shown.
pub const CONFIG_PROBLEMS_MAX: usize = 20;
/// How deep tables and lists of a configuration may nest.
pub const CONFIG_DEPTH_MAX: usize = 16;
/// How many artifacts of a task are uploaded at once.
pub const UPLOADS_CONCURRENT_MAX: usize = 8;
/// How long an upload without a definite answer is tried again; the lease is extended meanwhile.
pub const UPLOAD_RETRY_MAX: Duration = Duration::from_secs(10 * 60);
/// How long a handler may take beyond the end of a payload's grace before it is dropped.
pub const KILL_SLACK: Duration = crate::domain::lease::KILL_SLACK;
/// The largest task definition that `journeyman task create` sends.
pub const TASK_DEFINITION_BYTES_MAX: u64 = 1 << 20;
/// How many pages of a listing `journeyman task list` reads.
pub const TASK_LIST_PAGES_MAX: usize = 10;
/// The longest argument, or variable with its name, that Linux passes on to a program: 32 pages, less the NUL at its end.
pub const ARGUMENT_BYTES_MAX: usize = 32 * 4096 - 1;
/// The first pause of a command that waits for a task.
pub const TASK_WAIT_POLL_MIN: Duration = Duration::from_millis(50);
/// The longest pause of a command that waits for a task.
pub const TASK_WAIT_POLL_MAX: Duration = Duration::from_secs(2);
/// How long after a payload's end its output is waited for, while something it left behind holds it open.
pub const PROCESS_OUTPUT_DRAIN: Duration = Duration::from_secs(1);
/// How long processes may take to go after they were killed, and their output to end.
pub const PROCESS_KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// How many of the processes that are left are named.
pub const PROCESSES_LISTED_MAX: usize = 20;
/// How long before the end of an order's grace a payload is killed, so that its end is seen in time.
pub const PROCESS_KILL_MARGIN: Duration = Duration::from_secs(2);
/// How much of a payload's output is read at a time.
pub const PROCESS_READ_BYTES: usize = 16 << 10;
/// How long a payload may take to end by itself once it was told to, unless configured.
pub const TERMINATION_GRACE_DEFAULT: Duration = Duration::from_secs(10);
/// How much of a process's environment is searched for whose it is.
pub const PROCESS_ENVIRONMENT_BYTES_MAX: u64 = 4 << 20;
/// How many times what is mounted in a task's folder is looked for and unmounted.
pub const UNMOUNT_PASSES_MAX: usize = 4096;
/// How many control groups below a claim's own are looked into.
pub const CGROUPS_NESTED_MAX: usize = 10_000;
/// How long a control group may take to be frozen before its processes are killed as they are.
pub const CGROUP_FREEZE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long each step of finding out about the host's control groups may take.
pub const CONTAINMENT_PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many times in a row a claim's orphans are looked for where one ended under the look.
pub const ORPHAN_SCANS_MAX: usize = 20;
/// How often exited orphans are reaped.
pub const REAP_INTERVAL: Duration = Duration::from_millis(100);
/// The same if the processes of a task are limited: an exited process counts until it is reaped.
pub const REAP_INTERVAL_PIDS_LIMITED: Duration = Duration::from_millis(20);
/// How long a payload's forerunner may take to become the payload. It is milliseconds, unless the host is in trouble.
pub const PROCESS_START_TIMEOUT: Duration = Duration::from_secs(30);
/// How much of what a payload's forerunner says is kept: the last of it.
pub const SHIM_MESSAGE_BYTES_MAX: usize = 4 << 10;
/// How long after a control group was killed its processes are killed one by one, if any are left.
pub const CGROUP_KILL_EACH_DELAY: Duration = Duration::from_millis(200);
/// How often a control group that is not empty yet is killed again.
pub const CGROUP_KILL_INTERVAL: Duration = Duration::from_secs(1);
/// How many times a lock that another process has is tried.
pub const LOCK_ATTEMPTS_MAX: u32 = 100;
/// How long from one try to the next.
pub const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// How many times a task's folder is removed before it is left where it is: something may still write into it.
pub const FOLDER_REMOVALS_MAX: usize = 5;
/// How many folders that could not be removed are kept beside the work folder's tasks.
pub const LEFTOVER_FOLDERS_MAX: usize = 1_000;
/// How often a task's folder is measured where its size is limited.
pub const DISK_USAGE_INTERVAL: Duration = Duration::from_secs(5);
/// How long a program may take to check a payload.
pub const PROGRAM_CHECK_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest line that a program may send to the worker.
pub const PROGRAM_LINE_BYTES_MAX: usize = 64 << 10;
/// How many bytes of a program's lines are read at a time.
pub const PROGRAM_READ_BYTES: usize = 8 << 10;
/// How many reasons a program may give for refusing a payload.
pub const PROGRAM_REASONS_MAX: usize = 20;
/// How many lines of a program are heeded.
pub const PROGRAM_LINES_MAX: usize = 20_000;
/// How many complaints about a program's lines go into the log.
pub const PROGRAM_IGNORED_LINES_LOGGED_MAX: usize = 20;
/// The largest schema file that is read.
pub const SCHEMA_BYTES_MAX: u64 = 1 << 20;
/// How long a worker that was told to end at once may take before the process ends anyway.
pub const ABORT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the tasks of `journeyman dev --demo` may take, all together.
pub const DEMO_TASKS_TIMEOUT: Duration = Duration::from_secs(120);
/// How often the demo polls its tasks.
pub const DEMO_REDRAW_INTERVAL: Duration = Duration::from_millis(150);
/// How much of a log the demo reads.
pub const DEMO_LOG_BYTES_MAX: usize = 4 << 20;
/// How long making a connection to a metadata service may take; it is on this very host.
pub const METADATA_CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a metadata service may take to answer a call that it does not hold.
pub const METADATA_TIMEOUT: Duration = Duration::from_secs(2);
/// The largest answer of a metadata service that is read: a list of events for a whole scale set.
pub const METADATA_BODY_BYTES_MAX: usize = 256 << 10;
/// How often EC2's metadata service is asked for a notice; what AWS recommends.
pub const NOTICE_POLL_INTERVAL_AWS: Duration = Duration::from_secs(5);
/// How often Google's metadata service is asked where it does not hold the call.
pub const NOTICE_POLL_INTERVAL_GCP: Duration = Duration::from_secs(1);
/// How often Azure's metadata service is asked for events; what Azure recommends.
pub const NOTICE_POLL_INTERVAL_AZURE: Duration = Duration::from_secs(1);
/// How often the notice file is looked at.
pub const NOTICE_FILE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long Google's metadata service is asked to hold a call.
pub const NOTICE_LONG_POLL_WAIT: Duration = Duration::from_secs(30);
/// How long a token of EC2's metadata service is asked to live; its longest.
pub const NOTICE_TOKEN_TTL: Duration = Duration::from_secs(6 * 60 * 60);
/// How many of Azure's events are heeded.
pub const NOTICE_EVENTS_MAX: usize = 100;
/// How much of the notice file is read.
pub const NOTICE_FILE_BYTES_MAX: u64 = 256;
/// When a notice file that is empty is looked at again, before it is an order.
pub const NOTICE_FILE_EMPTY_DELAY: Duration = Duration::from_millis(250);
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
pub const HOST_PROBE_BYTES: usize = 64 << 10;
/// How many files are opened at once when the host is looked at; what one task takes with its pipes.
pub const HOST_PROBE_FILES: usize = 16;
/// How long a look at the host may take before its disk counts as unfit.
pub const HOST_PROBE_TIMEOUT: Duration = Duration::from_secs(10);
/// The most threads that run handlers, unless set. What they run is processes, which have their own.
pub const HANDLER_THREADS_MAX: usize = 16;
/// How long a worker that exits waits for its handlers to be dropped, and their processes with them.
pub const HANDLERS_DROP_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a worker that exits waits for an orderly goodbye to its sources, all at once.
pub const SOURCES_CLOSE_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the worker looks what its host has left.
pub const HOST_RESOURCES_INTERVAL: Duration = Duration::from_secs(10);
/// How much of what a task says of its progress is kept.
pub const PROGRESS_CHARS_MAX: usize = 200;
/// How often a command that waits for a worker to be gone, or a task, looks.
pub const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(250);
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
pub const DOCTOR_CHECK_TIMEOUT: Duration = Duration::from_secs(40);
/// How long it waits for a name, or for a connection.
pub const DOCTOR_STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it waits for an answer of a service.
pub const DOCTOR_CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// With fewer free inodes than this it warns: one checkout of a large project takes more.
pub const DOCTOR_FREE_INODES_MIN: u64 = 100_000;
/// How many descriptors a worker takes without tasks: connections, sockets, threads' pipes.
pub const WORKER_OPEN_FILES: u64 = 128;
/// With fewer than so many a worker does not begin: it could not answer who asks what it lacks.
pub const WORKER_OPEN_FILES_MIN: u64 = 64;
/// How many descriptors a task may take: its pipes, its log, its uploads and their connections.
pub const TASK_OPEN_FILES: u64 = 16;
/// How many lines of the worker's own log may wait for whoever reads it; the next ones are dropped and counted.
pub const LOG_LINES_QUEUED_MAX: usize = 8_192;
/// How many bytes of it are written at once at most, whole lines that came together.
pub const LOG_WRITE_BYTES: usize = 64 * 1024;
/// How long after a write the next lines are gathered.
pub const LOG_BATCH_DELAY: Duration = Duration::from_millis(20);
/// How long a word to the worker-runner may take to be written.
pub const RUNNER_SEND_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a worker that cannot begin waits for the worker-runner's welcome, to say why.
pub const RUNNER_WELCOME_TIMEOUT: Duration = Duration::from_secs(5);
/// How much of a journal is read at a start. Written anew long before it is that large, it cannot be.
pub const JOURNAL_BYTES_MAX: u64 = 64 << 20;
/// How much may wait for the disk before a journal is written anew instead: thousands of claims.
pub const JOURNAL_PENDING_BYTES_MAX: usize = 1 << 20;
/// How long a claim waits for its record before the host counts as unfit.
pub const JOURNAL_WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a poll that claims waits until its record would outlive the worker.
pub const JOURNAL_POLL_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a worker that exits waits for its journal; what is not written then is asked for at the next start.
pub const JOURNAL_CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// How much of an artifact that is a log is looked at in one piece.
pub const REDACT_READ_BYTES: usize = 256 * 1024;
/// The largest body of a request that is read as JSON for its handler; a larger one is handed on as text.
pub const REQUEST_JSON_BYTES_MAX: usize = 1 << 20;
/// The shortest time between two reports of a task that goes on that may be set.
pub const ACTIVITY_REPEAT_MIN: Duration = Duration::from_secs(2);
/// How many answers to one call may wait to be taken.
pub const REPLIES_QUEUED_MAX: usize = 256;
/// The longest name of a container: it is a host's name, too.
pub const CONTAINER_NAME_BYTES_MAX: usize = 63;
/// The longest name of a Deployment: those of its pods, which are names of hosts, are 17 characters longer.
pub const DEPLOYMENT_NAME_BYTES_MAX: usize = 46;
/// The longest name of another object of a cluster, and the longest label.
pub const OBJECT_NAME_BYTES_MAX: usize = 63;
/// The longest name of a unit that is made here. There may be 15 more, which files and folders of its name need.
pub const UNIT_NAME_BYTES_MAX: usize = 240;
