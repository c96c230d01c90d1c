//! What a Zuul keeps in ZooKeeper: one row for each path, which the commands that look at a tree read.

/// How the data of a node are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// None.
    Empty,
    /// JSON.
    Json,
    /// JSON, compressed.
    CompressedJson,
    /// JSON, compressed and cut into children.
    Sharded,
    /// Another text, compressed and cut into children.
    ShardedText,
    /// The first shard with a head, further ones in children.
    Expandable,
    /// The name of a class, then JSON, compressed.
    Polymorphic,
    /// Bytes of another program.
    Opaque,
}

/// Who writes a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The scheduler, and where it says so the web server.
    Scheduler,
    /// Who submits a request, which is the scheduler too.
    Submitter,
    /// The worker: executor or merger.
    Worker,
    /// The launcher, which makes nodes to run builds on.
    Launcher,
    /// Every process.
    All,
}

/// A path of the map. `*` stands for one name, `**` at the end for all below.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// The path.
    pub pattern: &'static str,
    /// What it is.
    pub what: &'static str,
    /// How its data are written.
    pub encoding: Encoding,
    /// Who writes it.
    pub writer: Writer,
}

const fn row(pattern: &'static str, encoding: Encoding, writer: Writer, what: &'static str) -> Row {
    Row { pattern, what, encoding, writer }
}

use Encoding::{CompressedJson, Empty, Expandable, Json, Opaque, Polymorphic, Sharded, ShardedText};
use Writer::{All, Launcher, Scheduler, Submitter, Worker};

/// The folders of a job queue, below its root.
const JOB_QUEUE_ROWS: [Row; 10] = [
    row(
        "requests/*",
        Json,
        Submitter,
        "a request; workers watch them and take the lowest precedence first, then the oldest",
    ),
    row("requests/*/cancel", Empty, Submitter, "asks the worker of a build to stop it"),
    row("requests/*/resume", Empty, Submitter, "asks the worker of a paused build to go on"),
    row("locks/*", Empty, Worker, "the lock of a request; it outlives the request"),
    row("locks/*/*", Opaque, Worker, "a contender; the lowest number holds the lock, as long as its session lives"),
    row("params/*", Sharded, Submitter, "the parameters of a request; the worker removes them when it starts"),
    row("result-data/*", Sharded, Worker, "the result of a merge, for a submitter that waits"),
    row("results/*", Json, Worker, "says that the result is complete, and where it is"),
    row("waiters/*", Empty, Submitter, "a submitter waits for the result, as long as its session lives"),
    row("*", Empty, All, "a folder of a job queue"),
];

const JOB_QUEUE_ROOTS: [&str; 3] = ["/zuul/merger", "/zuul/executor/unzoned", "/zuul/executor/zones/*"];

/// The folders of an event queue, below its root.
const EVENT_QUEUE_ROWS: [Row; 4] = [
    row("queue/*", Json, All, "an event, in the order of the numbers; its data or where they are"),
    row("data/*", Sharded, All, "the data of an event that are too large for its node"),
    row("election*/**", Opaque, Scheduler, "which scheduler reads these events"),
    row("*", Empty, All, "a folder of an event queue"),
];

const EVENT_QUEUE_ROOTS: [&str; 6] = [
    "/zuul/events/connection/*/events",
    "/zuul/events/tenant/*/management",
    "/zuul/events/tenant/*/trigger",
    "/zuul/events/tenant/*/pipelines/*/management",
    "/zuul/events/tenant/*/pipelines/*/result",
    "/zuul/events/tenant/*/pipelines/*/trigger",
];

/// A child of sharded data, by its number.
const SHARD: Row = row("", Opaque, All, "a part of the data of its parent");

const ROWS: &[Row] = &[
    row("/zookeeper/**", Opaque, All, "the server's own"),
    row("/zuul-system", Json, All, "the id of this system, kept when everything else is removed"),
    row("/keystorage/**", Opaque, Scheduler, "encrypted keys of projects"),
    row("/zuul", Empty, All, "everything that can be made anew; remove it to reset the system"),
    row(
        "/zuul/cache/connection/*/branches/data",
        Sharded,
        Scheduler,
        "the branches of a connection's projects, before Zuul 11",
    ),
    row("/zuul/cache/connection/*/branches/lock/**", Opaque, Scheduler, "the read and write lock of the branches"),
    row("/zuul/cache/connection/*/project/data/*", Expandable, Scheduler, "the branches of a project"),
    row("/zuul/cache/connection/*/project/lock/**", Opaque, Scheduler, "the lock of a project's branches"),
    row(
        "/zuul/cache/connection/*/cache/*",
        Json,
        Scheduler,
        "an entry of the change cache; the name is the hash of its key",
    ),
    row(
        "/zuul/cache/connection/*/data/*",
        Sharded,
        Scheduler,
        "a change, named by its entry; old ones are removed by and by",
    ),
    row(
        "/zuul/cache/blob/data/*/*/data",
        ShardedText,
        Scheduler,
        "a blob by its hash, such as a secret or the state of a repository",
    ),
    row(
        "/zuul/cache/blob/data/*/*/complete",
        Empty,
        Scheduler,
        "says that a blob is complete, and when it was last used",
    ),
    row("/zuul/cache/blob/lock/**", Opaque, Scheduler, "the lock of a blob"),
    row("/zuul/capcheck*", Empty, All, "a client tries out what the server can do"),
    row("/zuul/cleanup/*", Empty, Scheduler, "the lock of a clean-up, so that one scheduler does it"),
    row("/zuul/cleanup/*/*", Opaque, Scheduler, "who does the clean-up"),
    row("/zuul/components/*", Empty, All, "the processes of one kind"),
    row("/zuul/components/*/*", Json, All, "a process, as long as its session lives"),
    row("/zuul/config/cache/*/*", Json, Scheduler, "when the configuration of a branch was read"),
    row("/zuul/config/cache/*/*/files/*", ShardedText, Scheduler, "a configuration file of a branch"),
    row("/zuul/config/lock/**", Opaque, Scheduler, "the lock of a project's configuration"),
    row("/zuul/endpoint/*/quota/**", CompressedJson, Launcher, "what a cloud allows and what is used of it"),
    row(
        "/zuul/events/connection/*/election*/**",
        Opaque,
        Scheduler,
        "which scheduler reads the events of a connection",
    ),
    row("/zuul/events/connection/*/checkpoint*", Json, Scheduler, "up to where the events of a connection were read"),
    row("/zuul/events/tenant/*/state", CompressedJson, Scheduler, "whether the queues of a tenant are paused"),
    row("/zuul/global-semaphores/*", Json, Scheduler, "who holds a semaphore of all tenants"),
    row("/zuul/hold-requests/*", Json, Scheduler, "asks to keep the nodes of a build that fails"),
    row("/zuul/hold-requests/*/lock/**", Opaque, Worker, "the lock of such a request"),
    row("/zuul/image-uploads/**", Polymorphic, Launcher, "an upload of an image to a cloud"),
    row("/zuul/images/**", Polymorphic, Launcher, "an image that builds run on"),
    row("/zuul/launcher/stats-election/**", Opaque, Launcher, "which launcher reports statistics"),
    row("/zuul/layout/*", Json, Scheduler, "which layout of a tenant is in force"),
    row("/zuul/layout-data/*", Sharded, Scheduler, "how old the caches may be that a layout was made from"),
    row("/zuul/locks/events/**", Opaque, Scheduler, "the lock of a tenant's events; needed to remove, not to add"),
    row("/zuul/locks/pipeline/**", Opaque, Scheduler, "the lock of a pipeline"),
    row("/zuul/locks/tenant/**", Opaque, Scheduler, "the read and write lock of a tenant's layout"),
    row("/zuul/locks/connection/**", Opaque, Scheduler, "the lock of a connection"),
    row("/zuul/ltime", Empty, All, "the logical clock: the number of the last write is the time"),
    row("/zuul/nodepool/election/**", Opaque, Scheduler, "which scheduler watches for requested nodes"),
    row("/zuul/nodes/nodes/*/**", Polymorphic, Launcher, "a node that builds run on"),
    row("/zuul/nodes/locks/**", Opaque, Launcher, "the lock of a node"),
    row("/zuul/nodeset/requests/*/**", CompressedJson, Scheduler, "a request for nodes"),
    row("/zuul/nodeset/locks/**", Opaque, Launcher, "the lock of a request for nodes"),
    row("/zuul/results/management/*", Json, Scheduler, "the answer to an administrator, who made the node and waits"),
    row("/zuul/scheduler/timer-election/**", Opaque, Scheduler, "which scheduler makes the events of timers"),
    row("/zuul/scheduler/stats-election/**", Opaque, Scheduler, "which scheduler reports statistics"),
    row("/zuul/semaphores/*/*", Json, Scheduler, "who holds a semaphore of a tenant; holders that died stay"),
    row("/zuul/system/conf", Sharded, Scheduler, "the configuration of all tenants"),
    row("/zuul/system/conf-lock/**", Opaque, Scheduler, "the lock of the configuration"),
    row("/zuul/tenant/*/pipeline/*", CompressedJson, Scheduler, "the state of a pipeline"),
    row("/zuul/tenant/*/pipeline/*/dirty", Empty, Scheduler, "asks for another look at a pipeline"),
    row("/zuul/tenant/*/pipeline/*/change_list", Sharded, Scheduler, "the changes of a pipeline"),
    row("/zuul/tenant/*/pipeline/*/status", Sharded, Scheduler, "the status of a pipeline, as the web server shows it"),
    row("/zuul/tenant/*/pipeline/*/queue/*", CompressedJson, Scheduler, "a queue of a pipeline"),
    row("/zuul/tenant/*/pipeline/*/item/*", CompressedJson, Scheduler, "an item of a queue"),
    row("/zuul/tenant/*/pipeline/*/item/*/buildset/*", CompressedJson, Scheduler, "the builds of an item"),
    row(
        "/zuul/tenant/*/pipeline/*/item/*/buildset/*/repo_state",
        Sharded,
        Scheduler,
        "the state of repositories, before Zuul 10",
    ),
    row(
        "/zuul/tenant/*/pipeline/*/item/*/buildset/*/job/*",
        CompressedJson,
        Scheduler,
        "a job as it was when its builds began",
    ),
    row("/zuul/tenant/*/pipeline/*/item/*/buildset/*/job/*/build/*", CompressedJson, Scheduler, "a build of a job"),
    row("/zuul/tenant/*/pipeline/*/item/*/buildset/*/job/*/**", Sharded, Scheduler, "a large part of a job or a build"),
];

/// What is known of a path.
pub fn find(path: &str) -> Option<Row> {
    find_row(path).or_else(|| {
        let (parent, name) = path.rsplit_once('/')?;
        let is_number = name.len() == 10 && name.bytes().all(|byte| byte.is_ascii_digit());
        let encoding = find_row(parent).filter(|_| is_number)?.encoding;
        matches!(encoding, Sharded | ShardedText | Expandable).then_some(SHARD)
    })
}

fn find_row(path: &str) -> Option<Row> {
    let nested = |roots: &[&str], rows: &[Row]| {
        roots.iter().find_map(|root| {
            let below = strip(root, path)?;
            rows.iter().find(|row| matches(row.pattern, below)).copied()
        })
    };
    let known = nested(&JOB_QUEUE_ROOTS, &JOB_QUEUE_ROWS).or_else(|| nested(&EVENT_QUEUE_ROOTS, &EVENT_QUEUE_ROWS));
    known.or_else(|| {
        ROWS.iter().find(|row| matches(row.pattern.trim_start_matches('/'), path.trim_start_matches('/'))).copied()
    })
}

/// True if a node without a row lies on the way to one that has.
pub fn is_folder(path: &str) -> bool {
    let depth = path.split('/').count();
    let head = |pattern: &str| pattern.split('/').take(depth).collect::<Vec<_>>().join("/");
    let patterns = ROWS.iter().map(|row| row.pattern).chain(JOB_QUEUE_ROOTS).chain(EVENT_QUEUE_ROOTS);
    patterns.into_iter().any(|pattern| matches(&head(pattern), path))
}

/// The rest of a path below a root.
fn strip<'a>(root: &str, path: &'a str) -> Option<&'a str> {
    let end = path.match_indices('/').nth(root.split('/').count() - 1)?.0;
    let (head, below) = path.split_at_checked(end)?;
    matches(root, head).then(|| below.trim_start_matches('/')).filter(|below| !below.is_empty())
}

fn matches(pattern: &str, path: &str) -> bool {
    let (mut pattern, mut path) = (pattern.split('/'), path.split('/'));
    loop {
        match (pattern.next(), path.next()) {
            (Some("**"), _) | (None, None) => return true,
            (Some(wanted), Some(name)) => {
                let fits = wanted.strip_suffix('*').map_or(wanted == name, |head| name.starts_with(head));
                if !fits {
                    return false;
                }
            }
            (Some(_), None) | (None, Some(_)) => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_every_part_are_found() {
        for (path, what, encoding) in [
            ("/zuul/merger/requests/abc", "a request", Json),
            ("/zuul/executor/zones/eu/params/abc", "the parameters", Sharded),
            ("/zuul/executor/unzoned/locks/abc/x__lock__0000000001", "a contender", Opaque),
            ("/zuul/events/tenant/t/pipelines/gate/result/queue/q0000000001", "an event", Json),
            ("/zuul/events/connection/gerrit/election/x", "which scheduler", Opaque),
            ("/zuul/components/executor/host0000000003", "a process", Json),
            ("/zuul/capcheck0000000001", "a client", Empty),
            ("/zuul/tenant/t/pipeline/gate/item/a/buildset/b/job/c/build/d/result_data", "a large part", Sharded),
            ("/keystorage/gerrit/org/project/secrets", "encrypted keys", Opaque),
        ] {
            let found = find(path).unwrap_or_else(|| panic!("{path} is not on the map"));
            assert!(found.what.starts_with(what) && found.encoding == encoding, "{path}: {found:?}");
        }
        assert!(find("/zuul/unheard/of").is_none() && !is_folder("/zuul/unheard"));
        assert!(is_folder("/zuul/events/tenant/t") && is_folder("/zuul/tenant"));
    }
}
