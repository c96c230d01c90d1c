//! `journeyman zk tree`, `show` and `watch`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::job_failure as failure;
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use crate::zookeeper::Session;
use crate::zookeeper::decode::Decoded;
use crate::zookeeper::inspect::{Contender, Walk};
use crate::zookeeper::watch::{TreeEvent, TreeWatch};
use journeyman_domain::limits::ZOOKEEPER_TREE_NODES_MAX;

/// Prints the nodes below a path.
pub(super) async fn tree(session: &Session, path: &str, format: Format) -> ExitResult {
    let mut stack = vec![(path.trim_end_matches('/').to_owned(), 0_usize)];
    let mut printed = 0;
    while let Some((path, depth)) = stack.pop() {
        printed += 1;
        if printed > ZOOKEEPER_TREE_NODES_MAX {
            return Err(Failure::new(
                Exit::Failed,
                format!("there are more than {ZOOKEEPER_TREE_NODES_MAX} nodes; name a path below"),
            ));
        }
        let shown = if path.is_empty() { "/" } else { &path };
        let Some(mut names) = session.children(shown).await.map_err(|error| failure(&error.into()))? else {
            return Err(Failure::new(Exit::Failed, format!("{shown} does not exist")));
        };
        if format == Format::Json {
            output::line(&json!({ "path": shown, "children": names.len() }).to_string())?;
        } else {
            let name = shown.rsplit('/').next().filter(|name| !name.is_empty() && depth > 0).unwrap_or(shown);
            output::line(&format!("{:depth$}{name}", "", depth = depth * 2))?;
        }
        names.sort_unstable_by(|one, other| other.cmp(one));
        stack.extend(names.into_iter().map(|name| (format!("{path}/{name}"), depth + 1)));
    }
    Ok(Exit::Success)
}

/// Prints one node: its data, and who holds its lock.
pub(super) async fn show(session: &Session, path: &str, format: Format) -> ExitResult {
    let found = session.decode(path).await.map_err(|error| failure(&error))?;
    let Some(Decoded { stat, data, points_to }) = found else {
        return Err(Failure::new(Exit::Failed, format!("{path} does not exist")));
    };
    // The lock of a request is beside it.
    let request = path.rsplit_once("/requests/").filter(|(_, id)| !id.contains('/'));
    let lock = request.map_or_else(|| path.to_owned(), |(root, id)| format!("{root}/locks/{id}"));
    let mut walk = Walk::default();
    let walked = session.walk(&mut walk, &lock, ZOOKEEPER_TREE_NODES_MAX, |folder| folder == lock);
    walked.await.map_err(|error| failure(&error.into()))?;
    let mut contenders = walk.contenders();
    contenders.retain(|one| one.lock == lock);
    let owner = (stat.ephemeral_owner != 0).then(|| format!("{:#x}", stat.ephemeral_owner));
    if format == Format::Json {
        let shown = json!({
            "path": path, "version": stat.version, "czxid": stat.czxid, "mzxid": stat.mzxid,
            "ctime_ms": stat.ctime, "mtime_ms": stat.mtime, "owner": owner, "bytes": stat.data_length,
            "children": stat.num_children, "contenders": contenders.iter().map(contender_json).collect::<Vec<_>>(), "points_to": points_to, "data": data,
        });
        output::line(&shown.to_string())?;
        return Ok(Exit::Success);
    }
    let mut out = String::new();
    let mut field = |name: &str, value: &str| {
        if !value.is_empty() {
            _ = writeln!(out, "{name:<11} {value}");
        }
    };
    field("path", path);
    field("version", &format!("{} of {} bytes, {} children", stat.version, stat.data_length, stat.num_children));
    field("changed", &jiff::Timestamp::from_millisecond(stat.mtime).unwrap_or_default().to_string());
    field("session", &owner.unwrap_or_default());
    for one in contenders {
        let since = jiff::Timestamp::from_millisecond(one.since_ms).unwrap_or_default();
        let does = if one.holds { "held by" } else { "waited for by" };
        field("lock", &format!("{does} session {:#x} since {since}: {}", one.session, one.path));
    }
    field("points to", &points_to.join(", "));
    output::line(out.trim_end())?;
    if data != Value::Null {
        output::line(&serde_json::to_string_pretty(&data).unwrap_or_default())?;
    }
    Ok(Exit::Success)
}

fn contender_json(one: &Contender) -> Value {
    json!({ "path": one.path, "session": format!("{:#x}", one.session), "since_ms": one.since_ms, "holds": one.holds })
}

/// Prints a line for each change below a path, until it is stopped.
pub(super) async fn watch(session: Session, path: &str, format: Format) -> ExitResult {
    let session = std::sync::Arc::new(session);
    let mut tree = TreeWatch::start(&session, path).await.map_err(|error| failure(&error.into()))?;
    loop {
        let (kind, path) = match tree.next().await {
            TreeEvent::Created(path) => ("created", path),
            TreeEvent::Changed(path) => ("changed", path),
            TreeEvent::Deleted(path) => ("deleted", path),
            TreeEvent::EventsLost => ("reconnected", String::new()),
            TreeEvent::Ended => return Err(Failure::new(Exit::Unreachable, "the session has expired")),
        };
        // It may be gone again.
        let data = match kind {
            "created" | "changed" => session.decode(&path).await.ok().flatten().map(|decoded| decoded.data),
            _ => None,
        };
        let data = data.unwrap_or_default();
        if format == Format::Json {
            output::line(&json!({ "event": kind, "path": path, "data": data }).to_string())?;
        } else {
            let data = if data == Value::Null { String::new() } else { data.to_string() };
            output::line(&format!("{kind:<11} {path} {data}"))?;
        }
    }
}
