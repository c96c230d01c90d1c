//! What receivers can make the notifier keep in memory.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::future::ready;

use crate::gremlin::{Act, Gremlin, head};
use crate::support::{Place, Receiver, answered, event, within};

const ATTEMPTS: usize = 32;
/// Of one attempt, beyond which it has read more than the beginning of an answer.
const ATTEMPT_KIB: usize = 64;
/// Of what else the process does in between.
const NOISE_KIB: usize = 4 << 10;

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
    let respond = move |_: &_| -> futures_util::future::BoxFuture<'static, Act> {
        let is_first = count.fetch_add(1, Ordering::Relaxed) < ATTEMPTS;
        Box::pin(ready(if is_first { answered(200) } else { Act::SayAndFlood(head(200, &[])) }))
    };
    let receiver = Receiver(Gremlin::responding(respond).await);
    let place = Place::new(&[("ci", &receiver)]);
    let notifier = place.start().await;
    let events = |from: usize| (from..from + ATTEMPTS).map(|id| event(&id.to_string(), &format!("lane-{id}")));
    notifier.publish_all(&events(0).collect::<Vec<_>>()).await;
    receiver.wait_for(ATTEMPTS).await;
    let process = process_in(place.folder());
    // The peak starts over.
    std::fs::write(format!("{process}/clear_refs"), "5").expect("it is a process of the test");
    let before = kib(&process, "VmRSS");

    notifier.publish_all(&events(ATTEMPTS).collect::<Vec<_>>()).await;
    receiver.wait_for(2 * ATTEMPTS).await;
    let all_delivered = async { while notifier.status("ci").await["messages"] != 0 {} };
    within("the end of the attempts", all_delivered).await;
    let peak = kib(&process, "VmHWM");
    println!(
        "{ATTEMPTS} endless answers at once: {} KiB, {} bytes sent",
        peak.saturating_sub(before),
        receiver.0.sent()
    );
    assert!(peak.saturating_sub(before) < ATTEMPTS * ATTEMPT_KIB + NOISE_KIB, "from {before} to {peak} KiB");
    notifier.stop().await;
}
