//! Each mechanism beside Zuul's own class.

use journeyman::zookeeper::lock::{HeldLock, LockMode};
use journeyman::zookeeper::semaphore::{Holder, Semaphore};
use zookeeper_client::CreateMode;

use crate::support::Tree;

#[tokio::test(flavor = "multi_thread")]
async fn a_lock_is_held_by_one_and_read_by_many() {
    let Some(tree) = Tree::new().await else { return };
    let take = async |mode| HeldLock::try_take(&tree.session, "/zuul/locks/x", mode).await.expect("it is answered");
    let held = take(LockMode::Exclusive).await.expect("it is free");
    assert!(take(LockMode::Exclusive).await.is_none() && take(LockMode::Read).await.is_none());
    held.release().await.expect("it is given up");
    let (one, two) =
        (take(LockMode::Read).await.expect("it is free"), take(LockMode::Read).await.expect("it is shared"));
    assert!(take(LockMode::Write).await.is_none());
    let waiting = tokio::spawn({
        let session = tree.session.clone();
        async move { HeldLock::take(&session, "/zuul/locks/x", LockMode::Write).await.expect("it comes to it") }
    });
    one.release().await.expect("it is given up");
    two.release().await.expect("it is given up");
    let write = crate::support::within("the write lock", waiting).await.expect("no panic");
    assert!(write.is_valid());
    assert_eq!(tree.session.children("/zuul/locks/x").await.expect("it is answered").expect("it is there").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn semaphores_are_taken_all_or_none() {
    let Some(tree) = Tree::new().await else { return };
    let semaphores =
        ["/zuul/semaphores/t/a", "/zuul/semaphores/t/b"].map(|path| Semaphore { path: path.to_owned(), max: 1 });
    let holder = |name: &str| Holder { buildset_path: format!("/zuul/tenant/t/{name}"), job_name: "j".to_owned() };
    let session = &tree.session;
    assert!(session.acquire_semaphores(&semaphores[1..], &holder("one")).await.expect("it is answered"));
    assert!(!session.acquire_semaphores(&semaphores, &holder("two")).await.expect("it is answered"));
    assert_eq!(session.semaphore_holders(&semaphores[0].path).await.expect("it is answered"), []);
    session.release_semaphore(&semaphores[1].path, &holder("one")).await.expect("it is answered");
    assert!(session.acquire_semaphores(&semaphores, &holder("two")).await.expect("it is answered"));
    let (first, second) = (session.ltime("/zuul/ltime").await, session.ltime("/zuul/ltime").await);
    assert!(first.expect("it is answered") < second.expect("it is answered"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_over_the_limit_is_refused_before_it_is_sent() {
    let Some(tree) = Tree::new().await else { return };
    let large = vec![b'x'; 1_000_001];
    let refused = tree.session.create("/large", &large, CreateMode::Persistent).await.expect_err("it is too large");
    assert!(refused.to_string().contains("/large") && refused.to_string().contains("1,000,000"), "{refused}");
    tree.session.write_shards("/large", &large).await.expect("shards are not");
    assert_eq!(tree.session.read_shards("/large").await.expect("they are read").expect("they are there"), large);
}
