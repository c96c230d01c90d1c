//! What receivers can make the notifier keep in memory.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::{BoxFuture, ready};

use crate::notifier::support::{Place, Receiver, answered, event, within};
use crate::support::gremlin::{Act, Gremlin, head};

const ATTEMPTS: usize = 32;
/// That the body of an answer may cost.
const BODY_KIB: usize = 32;
/// The memory of what else the process does in between.
const NOISE_KIB: usize = 2 << 10;

/// The process that works in this folder.
fn process_in(folder: &Path) -> String {
    let folder = folder.canonicalize().expect("it is there");
    let processes = std::fs::read_dir("/proc").expect("it is mounted").flatten();
    let found =
        processes.map(|entry| entry.path()).find(|path| path.join("cwd").read_link().is_ok_and(|cwd| cwd == folder));
    found.expect("it runs").display().to_string()
}

fn kib(process: &str, field: &str) -> usize {
    let status = std::fs::read_to_string(format!("{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the field is there");
    line.trim_matches([':', '\t', ' ']).trim_end_matches(" kB").parse().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn p7_answers_without_an_end_cost_little_memory() {
    let count = AtomicUsize::new(0);
    let respond = move |_: &_| -> BoxFuture<'static, Act> {
        let is_small = count.fetch_add(1, Ordering::Relaxed) < 2 * ATTEMPTS;
        Box::pin(ready(if is_small { answered(200) } else { Act::SayAndFlood(head(200, &[])) }))
    };
    let receiver = Receiver(Gremlin::responding(respond).await);
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    let process = process_in(place.path());
    let mut growths = Vec::new();
    for batch in 0..3 {
        // The peak starts over.
        std::fs::write(format!("{process}/clear_refs"), "5").expect("it is a process of the test");
        let before = kib(&process, "VmRSS");
        let ids = batch * ATTEMPTS..(batch + 1) * ATTEMPTS;
        let events: Vec<_> = ids.map(|id| event(&id.to_string(), &format!("lane-{id}"))).collect();
        notifier.publish_all(&events).await;
        let all_delivered = async { while notifier.status("ci").await["messages"] != 0 {} };
        within("the end of the attempts", all_delivered).await;
        growths.push(kib(&process, "VmHWM").saturating_sub(before));
    }
    let [_, small, endless] = growths[..] else { panic!("three batches") };
    println!("{ATTEMPTS} attempts at once: {small} KiB with small answers, {endless} KiB with endless ones");
    assert!(endless < small + ATTEMPTS * BODY_KIB + NOISE_KIB, "{endless} KiB");
    notifier.stop().await;
}
