//! `journeyman zk doctor`: checks a ZooKeeper, and the tree that the client of a source sees.
//!
//! Writes one ephemeral node, which it removes.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::find_source;
use crate::cli::checks::{Check, report};
use crate::cli::doctor::zookeeper::connect;
use crate::cli::exit::ExitResult;
use crate::cli::source_args::SourceArgs;
use journeyman_domain::limits::{
    DOCTOR_CALL_TIMEOUT, DOCTOR_CHECK_TIMEOUT, ZOOKEEPER_CLOCK_SKEW_MAX, ZOOKEEPER_NODE_BYTES_MAX,
    ZOOKEEPER_WALK_NODES_MAX,
};
use journeyman_domain::units::format_duration;
use journeyman_platform::host::clock::stamp;
use journeyman_platform::settings::Environment;
use journeyman_platform::zookeeper::inspect::Walk;
use journeyman_platform::zookeeper::{CreateMode, Error, Session, client as zk};
use journeyman_worker::source::zookeeper::config::ZooKeeperSource;

const SHOWN: usize = 3;

pub(super) async fn run(arguments: &SourceArgs, environment: &Environment) -> ExitResult {
    let (name, source) = find_source(arguments, environment)?;
    report(&check(&name, &source).await, arguments.output)
}

async fn check(name: &str, source: &ZooKeeperSource) -> Vec<Check> {
    let (session, queues, mut checks) = match connect(name, source).await {
        Ok(connected) => connected,
        Err(check) => return vec![check],
    };
    if let Ok(Some(version)) = timeout(DOCTOR_CALL_TIMEOUT, server_version(source)).await {
        checks.push(Check::ok("server", format!("version {version}")));
    }
    let queue = queues.first().map_or("", |queue| &queue.path);
    let is_there = session.stat(queue).await.is_ok_and(|stat| stat.is_some());
    let now_ms = check_writes(&session, if is_there { queue } else { "" }, &mut checks).await.unwrap_or_else(|error| {
        let fix = "give this client the rights to read, create, write and delete there";
        checks.push(Check::failed("permissions", error.to_string(), fix));
        stamp().0
    });
    let mut walk = Walk::default();
    let walking = session.walk(&mut walk, "/", ZOOKEEPER_WALK_NODES_MAX, |_| true);
    match timeout(DOCTOR_CHECK_TIMEOUT, walking).await {
        Ok(Ok(())) => match check_queues(&session, &walk, now_ms).await {
            Ok(queues) => {
                checks.extend(queues);
                checks.extend(check_tree(walk, now_ms));
            }
            Err(error) => checks.push(Check::failed("tree", error.to_string(), "is the connection stable?")),
        },
        Ok(Err(error)) => checks.push(Check::failed("tree", error.to_string(), "is the connection stable?")),
        Err(_) => checks.push(Check::failed("tree", "reading it takes too long", "set `chroot` to a part of it")),
    }
    checks
}

/// `srvr` is the four-letter command that servers answer by default. Over TLS they do not.
async fn server_version(source: &ZooKeeperSource) -> Option<String> {
    let server = source.connect.split(',').next().filter(|_| source.ca_file.is_none())?;
    let mut stream = TcpStream::connect(server).await.ok()?;
    stream.write_all(b"srvr").await.ok()?;
    let mut answer = String::new();
    stream.take(4 << 10).read_to_string(&mut answer).await.ok()?;
    let version = answer.strip_prefix("Zookeeper version: ")?;
    version.split(['-', ',', '\n']).next().map(str::to_owned)
}

/// Creates, reads, watches, fills and removes a node. Returns the server's time.
async fn check_writes(session: &Session, folder: &str, checks: &mut Vec<Check>) -> Result<i64, Error> {
    let path = format!("{folder}/journeyman-doctor-{}", uuid::Uuid::new_v4().simple());
    let before = stamp().0;
    session.create(&path, b"", CreateMode::Ephemeral).await?;
    let after = stamp().0;
    let (_, stat) = session.get(&path).await?.ok_or_else(|| Error::new("read", &path, zk::Error::NoNode))?;
    let has_event_zxids = session.has_event_zxids(&path).await?;
    let filled = session.set(&path, &vec![b'x'; ZOOKEEPER_NODE_BYTES_MAX], None).await;
    session.retry(|| session.delete(&path)).await?;
    checks.push(Check::ok("permissions", format!("this client can create, read, write and delete below {folder}/")));
    checks.push(match filled {
        Ok(_) => Check::ok("node size", "a node of 1,000,000 bytes is accepted"),
        Err(error) => {
            let fix = "leave `jute.maxbuffer` of the servers at 1 MiB or more";
            Check::failed("node size", format!("a node of 1,000,000 bytes is not accepted: {error}"), fix)
        }
    });
    checks.push(if has_event_zxids {
        Check::ok("watch events", "carry the transaction that caused them")
    } else {
        Check::ok("watch events", "carry no transaction, as before ZooKeeper 3.9; nothing here needs it")
    });
    let apart = Duration::from_millis(stat.ctime.abs_diff(stat.ctime.clamp(before, after)));
    checks.push(if apart > ZOOKEEPER_CLOCK_SKEW_MAX {
        let found = format!("this host and the server are {} apart", format_duration(apart));
        Check::warning("clock", found, "synchronize both: the ages of requests are measured with them")
    } else {
        Check::ok("clock", "this host and the server agree")
    });
    Ok(stat.ctime)
}

async fn check_queues(session: &Session, walk: &Walk, now_ms: i64) -> Result<Vec<Check>, Error> {
    let mut checks = Vec::new();
    for queue in walk.queues() {
        let oldest = session.oldest_waiting_ms(&queue).await?.map_or_else(String::new, |oldest| {
            let age = Duration::from_millis(now_ms.saturating_sub(oldest).try_into().unwrap_or(0));
            format!(", the oldest that waits is {} old", format_duration(age))
        });
        let found = format!("{}: {} requests, {} running{oldest}", queue.root, queue.requests, queue.running);
        checks.push(Check::ok("requests", found));
    }
    Ok(checks)
}

fn check_tree(walk: Walk, now_ms: i64) -> Vec<Check> {
    let fix = "their ACLs deny this client the right to read";
    let mut checks = vec![none_of("unreadable nodes", walk.denied.clone(), fix)];
    if walk.is_cut {
        let found = format!("more than {ZOOKEEPER_WALK_NODES_MAX} nodes: leftovers and locks were not checked");
        checks.push(Check::warning("tree", found, "set `chroot` to a part of it"));
        return checks;
    }
    let fix = "`journeyman zk janitor --once` with a source of that queue removes them, as a Zuul does once an hour";
    checks.push(none_of("leftovers", walk.leftovers(now_ms), fix));
    let held = walk.lone_contenders().into_iter().filter(|one| one.holds);
    let held = held.map(|one| format!("{} is held by session {:#x}, which owns nothing else", one.lock, one.session));
    let fix = "neither a component nor a waiter: if no such client runs, the lock ends with its session";
    checks.push(none_of("locks of unknown sessions", held.collect(), fix));
    checks
}

/// A warning with the first of these, if there are any.
fn none_of(name: &str, mut found: Vec<String>, fix: &str) -> Check {
    let more = found.len().saturating_sub(SHOWN);
    found.truncate(SHOWN);
    match (found.is_empty(), more) {
        (true, _) => Check::ok(name, "none"),
        (false, 0) => Check::warning(name, found.join("\n"), fix),
        (false, _) => Check::warning(name, format!("{}\nand {more} more", found.join("\n")), fix),
    }
}
