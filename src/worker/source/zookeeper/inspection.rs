//! What a status page shows of a tree: components, queues, locks and semaphores, read anew each time and bounded.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::ZooKeeperQueue;
use crate::source::InspectionTable;
use journeyman_domain::limits::{ZOOKEEPER_INSPECT_NODES_MAX, ZOOKEEPER_INSPECT_ROWS_MAX};
use journeyman_platform::zookeeper::inspect::Walk;
use journeyman_platform::zookeeper::{Error, Session};

const ROOTS: [&str; 5] =
    ["/zuul/components", "/zuul/merger", "/zuul/executor", "/zuul/semaphores", "/zuul/global-semaphores"];

pub(super) async fn tables(session: &Session, queues: &[ZooKeeperQueue]) -> Result<Vec<InspectionTable>, Error> {
    let mut walk = Walk::default();
    let own = queues.iter().map(|queue| queue.path.as_str()).filter(|path| !path.starts_with("/zuul/"));
    for root in ROOTS.into_iter().chain(own) {
        session.walk(&mut walk, root, ZOOKEEPER_INSPECT_NODES_MAX, is_looked_into).await?;
    }
    let (components, names) = components(session, &walk).await?;
    Ok(vec![
        components,
        queue_table(session, &walk).await?,
        locks(session, &walk, &names).await?,
        semaphores(session, &walk).await?,
    ])
}

/// The folders of a queue are counted; of a request only its lock matters.
fn is_looked_into(path: &str) -> bool {
    let (parent, name) = path.rsplit_once('/').unwrap_or_default();
    !parent.ends_with("/requests") && !["params", "result-data", "results", "waiters"].contains(&name)
}

fn table(name: &'static str, columns: &'static [&'static str], rows: Vec<Value>, total: usize) -> InspectionTable {
    let more = total.saturating_sub(rows.len());
    InspectionTable { name, columns, rows, more, note: None }
}

fn seconds_ago(ctime_ms: i64) -> f64 {
    let since = jiff::Timestamp::from_millisecond(ctime_ms).unwrap_or_default();
    jiff::Timestamp::now().duration_since(since).as_secs_f64().max(0.0)
}

/// Null for a node that is gone, or another program's.
async fn read(session: &Session, path: &str) -> Result<Value, Error> {
    Ok(session.get(path).await?.and_then(|(data, _)| serde_json::from_slice(&data).ok()).unwrap_or_default())
}

/// The second value names the session that owns each component.
async fn components(session: &Session, walk: &Walk) -> Result<(InspectionTable, BTreeMap<i64, Value>), Error> {
    let found = walk.nodes.iter().filter(|(path, stat)| path.starts_with(ROOTS[0]) && stat.ephemeral_owner != 0);
    let (mut rows, mut names, total) = (Vec::new(), BTreeMap::new(), found.clone().count());
    for (path, stat) in found.take(ZOOKEEPER_INSPECT_ROWS_MAX) {
        if let Value::Object(mut row) = read(session, path).await? {
            names.insert(stat.ephemeral_owner, row.get("hostname").cloned().unwrap_or_default());
            row.insert("since_seconds_ago".to_owned(), seconds_ago(stat.ctime).into());
            rows.push(row.into());
        }
    }
    let columns = &["kind", "hostname", "state", "accepting_work", "zone", "version", "model_api", "since_seconds_ago"];
    Ok((table("components", columns, rows, total), names))
}

async fn queue_table(session: &Session, walk: &Walk) -> Result<InspectionTable, Error> {
    let (queues, mut rows) = (walk.queues(), Vec::new());
    for queue in queues.iter().take(ZOOKEEPER_INSPECT_ROWS_MAX) {
        let oldest_ms = session.oldest_waiting_ms(queue).await?;
        rows.push(json!({
            "queue": queue.root, "requests": queue.requests, "running": queue.running,
            "oldest_waiting_seconds_ago": oldest_ms.map(seconds_ago),
        }));
    }
    let columns = &["queue", "requests", "running", "oldest_waiting_seconds_ago"];
    let note =
        walk.is_cut.then_some("Long queues are read in part: the oldest, the running and the locks may be more.");
    Ok(InspectionTable { note, ..table("queues", columns, rows, queues.len()) })
}

async fn locks(session: &Session, walk: &Walk, names: &BTreeMap<i64, Value>) -> Result<InspectionTable, Error> {
    let (holders, waiting): (Vec<_>, Vec<_>) = walk.contenders().into_iter().partition(|one| one.holds);
    let mut rows = Vec::new();
    for one in holders.iter().take(ZOOKEEPER_INSPECT_ROWS_MAX) {
        let holder = match names.get(&one.session) {
            Some(name) => name.clone(),
            None => read(session, &one.path).await?.get("worker").cloned().unwrap_or_default(),
        };
        let (queue, request) = one.lock.rsplit_once("/locks/").unwrap_or(("", &one.lock));
        rows.push(json!({
            "request": request, "queue": queue, "holder": holder, "session": format!("{:#x}", one.session),
            "waiting": waiting.iter().filter(|other| other.lock == one.lock).count(),
            "since_seconds_ago": seconds_ago(one.since_ms),
        }));
    }
    let columns = &["request", "queue", "holder", "session", "waiting", "since_seconds_ago"];
    Ok(table("locks", columns, rows, holders.len()))
}

async fn semaphores(session: &Session, walk: &Walk) -> Result<InspectionTable, Error> {
    // Those of a tenant are one level deeper.
    let is_one = |path: &str| path.starts_with("/zuul/semaphores/") && path.matches('/').count() == 4;
    let is_one = |path: &str| is_one(path) || path.starts_with("/zuul/global-semaphores/");
    let found: Vec<&String> = walk.nodes.keys().filter(|path| is_one(path)).collect();
    let mut rows = Vec::new();
    for path in found.iter().take(ZOOKEEPER_INSPECT_ROWS_MAX) {
        let holders: Vec<Value> = serde_json::from_value(read(session, path).await?).unwrap_or_default();
        let shown = &holders[..holders.len().min(ZOOKEEPER_INSPECT_ROWS_MAX)];
        rows.push(json!({ "semaphore": path, "held": holders.len(), "holders": shown }));
    }
    Ok(table("semaphores", &["semaphore", "held", "holders"], rows, found.len()))
}
