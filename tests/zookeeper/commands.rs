//! `journeyman zk` on a real tree.

use std::path::PathBuf;
use std::process::Stdio;

use journeyman::source::zookeeper::Dialect;
use journeyman_platform::zookeeper::client::{Acl, Client, ConnectOptions};
use journeyman_platform::zookeeper::lock::{HeldLock, LockMode};
use journeyman_platform::zookeeper::{CreateMode, Session};
use serde_json::{Value, json};
use tokio::io::AsyncBufReadExt as _;
use tokio::process::Command;

use crate::zookeeper::support::{Tree, within};

struct Zk {
    _folder: tempfile::TempDir,
    config: PathBuf,
}

impl Zk {
    fn on(tree: &Tree, dialect: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let config = folder.path().join("journeyman.toml");
        let (connect, chroot) = (&tree.connect.servers, tree.connect.chroot.as_deref().expect("a chroot"));
        let text = format!(
            "[source.ci]\nkind = \"zookeeper\"\nconnect = \"{connect}\"\nchroot = \"{chroot}\"\ndialect = \"{dialect}\"\n"
        );
        std::fs::write(&config, text).expect("it is written");
        Self { _folder: folder, config }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_journeyman"));
        command.arg("zk").args(arguments).args(["-o", "json", "--config"]).arg(&self.config);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true);
        command
    }

    /// The exit status and the JSON that it prints.
    async fn run(&self, arguments: &[&str]) -> (Option<i32>, Value) {
        let child = self.command(arguments).spawn().expect("it starts");
        let output = within("its end", child.wait_with_output()).await.expect("it is waited for");
        let printed = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
        (output.status.code(), printed)
    }
}

/// A client with other rights than everybody's.
pub(crate) async fn owner(tree: &Tree) -> Client {
    let (servers, session_timeout) = (tree.connect.servers.clone(), tree.connect.session_timeout);
    let auth = Some(("digest".to_owned(), b"owner:secret".to_vec()));
    let client = Client::connect(&ConnectOptions { servers, session_timeout, tls: None, auth }).await;
    let chroot = tree.connect.chroot.as_deref().expect("a chroot");
    client.expect("it is connected").chroot(chroot).expect("a path")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_cannot_be_waited_for() {
    let Some(tree) = Tree::new().await else { return };
    let zk = Zk::on(&tree, "zuul-executor");
    let mut command = zk.command(&["submit", "--wait"]);
    let output = within("its end", command.stderr(Stdio::piped()).output()).await.expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let requests = tree.session.children("/zuul/executor/unzoned/requests").await.expect("it is answered");
    assert_eq!(requests.unwrap_or_default(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_print_json() {
    let Some(tree) = Tree::new().await else { return };
    let zk = Zk::on(&tree, "zuul-executor");
    let (status, submitted) = zk.run(&["submit", "{}", "--field", "tenant_name=t"]).await;
    let id = submitted["request"].as_str().expect("an id").to_owned();
    assert_eq!((status, submitted), (Some(0), json!({ "request": id })));

    let queue = tree.queue(Dialect::ZuulExecutor);
    let lock = HeldLock::try_take(&tree.session, &queue.path("locks", &id), LockMode::Exclusive).await;
    let lock = lock.expect("it is answered").expect("it is free");
    let other = Session::connect(&tree.connect).await.expect("it is connected");
    let second = format!("{}/second__lock__", queue.path("locks", &id));
    other.create(&second, b"", CreateMode::EphemeralSequential).await.expect("it waits");
    for folder in ["requests", "locks"] {
        let (_, shown) = zk.run(&["show", &queue.path(folder, &id)]).await;
        let contenders = shown["contenders"].as_array().expect("a list");
        let session = |id: i64| format!("{id:#x}");
        let expected = [(session(tree.session.id()), true), (session(other.id()), false)];
        for (id, holds) in expected {
            let found = contenders.iter().find(|one| one["session"] == id);
            assert_eq!(found.map(|one| &one["holds"]), Some(&json!(holds)), "{shown}");
        }
    }
    lock.release().await.expect("it is given up");
    assert_eq!(zk.run(&["cancel", &id]).await, (Some(0), json!({ "request": id, "cancel": "requested" })));

    let cleans = HeldLock::try_take(&tree.session, "/zuul/cleanup/build_requests", LockMode::Exclusive).await;
    let cleans = cleans.expect("it is answered").expect("it is free");
    let mut janitor = zk.command(&["janitor"]).spawn().expect("it starts");
    let mut lines = tokio::io::BufReader::new(janitor.stdout.take().expect("it is piped")).lines();
    let line = within("a line", lines.next_line()).await.expect("it is text").expect("it goes on");
    assert_eq!(serde_json::from_str::<Value>(&line).expect("JSON"), json!({ "event": "busy" }));
    cleans.release().await.expect("it is given up");
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_names_what_is_odd_in_a_tree() {
    let Some(tree) = Tree::new().await else { return };
    let session = &tree.session;
    let queue = tree.queue(Dialect::ZuulExecutor);
    queue.ensure(session).await.expect("it is made");
    owner(&tree).await.create("/zuul/secret", b"", CreateMode::Persistent, Acl::CreatorAll).await.expect("it is made");
    session.create(&queue.path("waiters", "a"), b"", CreateMode::Ephemeral).await.expect("it waits");
    let known = HeldLock::try_take(session, &queue.path("locks", "a"), LockMode::Exclusive).await;
    let stranger = std::sync::Arc::new(Session::connect(&tree.connect).await.expect("it is connected"));
    let lone = HeldLock::try_take(&stranger, &queue.path("locks", "b"), LockMode::Exclusive).await;
    assert!(known.expect("it is answered").is_some() && lone.expect("it is answered").is_some());

    let (status, found) = Zk::on(&tree, "zuul-executor").run(&["doctor"]).await;
    let check = |name: &str| {
        let checks = found["checks"].as_array().expect("a list");
        let check = checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}: {found}"));
        (check["state"].as_str().expect("text"), check["result"].as_str().expect("text"))
    };
    for good in ["server", "permissions", "node size", "watch events", "clock", "requests", "leftovers"] {
        assert_eq!(check(good).0, "ok", "{found}");
    }
    assert_eq!(check("unreadable nodes"), ("warning", "/zuul/secret"));
    let (state, locks) = check("locks of unknown sessions");
    let expected = format!("/locks/b is held by session {:#x}, which owns nothing else", stranger.id());
    assert!(state == "warning" && locks.ends_with(&expected) && !locks.contains("/locks/a"), "{locks}");
    assert_eq!((status, &found["failed"]), (Some(0), &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn doctor_fails_without_the_rights_that_a_worker_needs() {
    let Some(tree) = Tree::new().await else { return };
    tree.session.ensure("/zuul").await.expect("it is made");
    owner(&tree).await.create("/zuul/merger", b"", CreateMode::Persistent, Acl::AnyoneRead).await.expect("it is made");
    let (status, found) = Zk::on(&tree, "zuul-merger").run(&["doctor"]).await;
    let failed = found["checks"].as_array().expect("a list").iter().find(|check| check["state"] == "failed");
    let failed = failed.unwrap_or_else(|| panic!("nothing failed: {found}"));
    assert_eq!((status, &failed["name"]), (Some(1), &json!("permissions")), "{found}");
    assert!(failed["result"].as_str().expect("text").contains("/zuul/merger/"), "{failed}");
}

/// A tenant's ssh key, and the root of a trigger queue, as Zuul 14.3 keeps them.
#[tokio::test(flavor = "multi_thread")]
async fn d5_private_keys_are_not_shown_and_other_data_are() {
    let Some(tree) = Tree::new().await else { return };
    let zk = Zk::on(&tree, "zuul-executor");
    let key = json!({ "schema": 1, "keys": [{ "version": 0, "private_key": "-----BEGIN", "public_key": "ssh-rsa" }] });
    let root = json!({ "last_reconfigure_event_ltime": 7 });
    let hidden =
        json!({ "schema": 1, "keys": [{ "version": 0, "private_key": "(not shown)", "public_key": "ssh-rsa" }] });
    for (path, data, expected) in [
        ("/keystorage2/tenant/t/ssh", &key, &hidden),
        ("/keystorage-oidc/RS256", &key, &hidden),
        ("/zuul/events/tenant/t/trigger", &root, &root),
    ] {
        tree.session.ensure(path).await.expect("it is made");
        tree.session.set(path, data.to_string().as_bytes(), None).await.expect("it is written");
        assert_eq!(&zk.run(&["show", path]).await.1["data"], expected, "{path}");
    }
}
