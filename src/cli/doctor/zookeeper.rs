//! Checks the connection to a ZooKeeper and the queue of a source.

use super::Check;
use crate::config::schema::ZooKeeperSource;

#[cfg(feature = "zookeeper")]
pub(super) async fn check_source(name: &str, source: &ZooKeeperSource) -> Vec<Check> {
    use crate::cli::zookeeper_setup;
    use crate::zookeeper::Session;

    let part = format!("{name}: ZooKeeper");
    let queue = match zookeeper_setup::queue(name, source) {
        Ok(queue) => queue,
        Err(failure) => return vec![Check::failed(part, failure.message, "set it to the path that submitters use")],
    };
    let session = match Session::connect(&zookeeper_setup::connect_config(source)).await {
        Ok(session) => session,
        Err(error) => {
            let fix = "is this the client port, with or without TLS as configured? A server with TLS wants a client \
                       certificate, and its own needs subject alternative names";
            return vec![Check::failed(part, error.to_string(), fix)];
        }
    };
    let seconds = session.timeout().as_secs();
    let connected = Check::ok(part, format!("{}: connected, sessions last {seconds} s", source.connect));
    let part = format!("{name}: queue");
    let found = match session.children(&format!("{queue}/requests")).await {
        Ok(Some(requests)) => Check::ok(part, format!("{queue}: {} requests", requests.len())),
        Ok(None) => {
            Check::warning(part, format!("{queue} does not exist"), "the worker creates it; is the path correct?")
        }
        Err(error) => Check::failed(part, error.to_string(), "does this client have the right to read there?"),
    };
    vec![connected, found]
}

#[cfg(not(feature = "zookeeper"))]
pub(super) fn check_source(name: &str, _source: &ZooKeeperSource) -> std::future::Ready<Vec<Check>> {
    let fix = "build it with the feature `zookeeper`, or remove the source";
    let found = "this journeyman was built without ZooKeeper".to_owned();
    std::future::ready(vec![Check::failed(format!("{name}: ZooKeeper"), found, fix)])
}
