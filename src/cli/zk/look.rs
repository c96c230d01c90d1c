//! `journeyman zk show`.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::job_failure as failure;
use crate::cli::exit::{Exit, ExitResult, Failure};
use crate::cli::output::{self, Format};
use journeyman_domain::limits::ZOOKEEPER_CONTENDERS_MAX;
use journeyman_platform::zookeeper::Session;
use journeyman_platform::zookeeper::decode::Decoded;
use journeyman_platform::zookeeper::inspect::{Contender, Walk};

/// Prints one node: its data, and who holds its lock.
pub(super) async fn show(session: &Session, path: &str, format: Format) -> ExitResult {
    let found = session.decode(path).await.map_err(|error| failure(&error))?;
    let Some(Decoded { stat, mut data, points_to }) = found else {
        return Err(Failure::new(Exit::Failed, format!("{path} does not exist")));
    };
    hide_private_keys(&mut data);
    // The lock of a request is beside it.
    let request = path.rsplit_once("/requests/").filter(|(_, id)| !id.contains('/'));
    let lock = request.map_or_else(|| path.to_owned(), |(root, id)| format!("{root}/locks/{id}"));
    let mut walk = Walk::default();
    let walked = session.walk(&mut walk, &lock, ZOOKEEPER_CONTENDERS_MAX, |folder| folder == lock);
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

/// Those of a Zuul are encrypted, and its password may be weak.
fn hide_private_keys(data: &mut Value) {
    match data {
        Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| match key.as_str() {
            "private_key" => *value = "(not shown)".into(),
            _ => hide_private_keys(value),
        }),
        Value::Array(items) => items.iter_mut().for_each(hide_private_keys),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn contender_json(one: &Contender) -> Value {
    json!({ "path": one.path, "session": format!("{:#x}", one.session), "since_ms": one.since_ms, "holds": one.holds })
}
