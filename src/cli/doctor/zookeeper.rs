//! Checks the connection to a ZooKeeper and the queues of a source. `journeyman zk doctor` checks more.

use crate::cli::checks::Check;
use journeyman_platform::zookeeper::Session;
use journeyman_worker::source::zookeeper::ZooKeeperQueue;
use journeyman_worker::source::zookeeper::config::ZooKeeperSource;

pub(super) async fn check_source(name: &str, source: &ZooKeeperSource) -> Vec<Check> {
    connect(name, source).await.map_or_else(|check| vec![check], |(_, _, checks)| checks)
}

/// The session, the queues, and how they are.
pub(in crate::cli) async fn connect(
    name: &str,
    source: &ZooKeeperSource,
) -> Result<(Session, Vec<ZooKeeperQueue>, Vec<Check>), Check> {
    let part = format!("{name}: ZooKeeper");
    let session = Session::connect(&source.connect_config()).await.map_err(|error| {
        let fix = "is this the client port, with or without TLS as configured? A server with TLS wants a client \
                   certificate, and its own needs subject alternative names";
        Check::failed(&part, error.to_string(), fix)
    })?;
    let (granted, asked) = (session.timeout(), source.session_timeout.0);
    let connected = format!("{}: connected, sessions last {} s", source.connect, granted.as_secs());
    let mut checks = vec![if granted < asked {
        let found = format!("{connected}, {} s were asked for", asked.as_secs());
        Check::warning(part, found, "raise `maxSessionTimeout` of the servers, or ask for less by `session_timeout`")
    } else {
        Check::ok(part, connected)
    }];
    let queues = source.queues();
    for ZooKeeperQueue { path, .. } in &queues {
        let part = format!("{name}: queue");
        checks.push(match session.children(&format!("{path}/requests")).await {
            Ok(Some(requests)) => Check::ok(part, format!("{path}: {} requests", requests.len())),
            Ok(None) => {
                Check::warning(part, format!("{path} does not exist"), "the worker creates it; is the path correct?")
            }
            Err(error) => Check::failed(part, error.to_string(), "does this client have the right to read there?"),
        });
    }
    Ok((session, queues, checks))
}
