//! The cases. Each one has a queue of its own.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use journeyman::source::{Artifact, ArtifactBody, CallError, LossReason, Message, Source};
use journeyman::task::ArtifactErrorReason;
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use serde_json::json;

use crate::conformance::bench::{Bench, Fut, Need, Span, Spec, messages, receive, recovery, take, take_one};

pub(crate) type RunCase = fn(Arc<dyn Bench>) -> Fut<'static, ()>;

/// One thing that the port promises.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) needs: &'static [Need],
    pub(crate) run: RunCase,
}

macro_rules! cases {
    ($($name:ident needs $($need:ident)*;)*) => {
        /// Every case.
        pub(crate) const CASES: &[Case] = &[$(Case {
            name: stringify!($name),
            needs: &[$(Need::$need),*],
            run: |bench| Box::pin($name(bench)),
        }),*];
    };
}

cases! {
    a_task_is_claimed_with_its_definition_and_a_lease needs Claims;
    a_claimed_run_is_not_given_to_a_second_worker needs Claims;
    a_claim_by_message_is_idempotent_for_its_worker_and_gone_for_another needs Claims Messages;
    an_unknown_run_is_gone needs Claims Messages;
    no_more_is_handed_out_than_was_asked_for needs Claims;
    higher_priorities_come_first needs Claims History;
    runs_that_many_workers_compete_for_are_each_given_once needs Claims History;
    a_poll_that_waits_is_answered_when_a_task_appears needs Claims Waits;
    a_reclaim_answers_with_a_lease_each_time needs Claims;
    a_reclaimed_run_outlives_its_first_lease needs Claims LeaseEnd;
    a_lease_that_ends_takes_the_run_away needs Claims LeaseEnd;
    each_outcome_ends_the_run_as_the_queue_has_it needs Claims History;
    a_repeated_outcome_is_accepted_and_another_is_gone needs Claims;
    a_run_handed_back_comes_again_as_the_next_one needs Claims History;
    a_task_without_retries_is_not_run_again needs Claims History;
    a_canceled_run_is_told_and_gone needs Claims History;
    a_claim_whose_reply_was_lost_is_taken_over_by_its_worker_alone needs Claims Recovery;
    what_an_earlier_life_claimed_is_taken_over_and_reported_once needs Claims History;
    artifacts_are_stored_and_read_back needs Claims Artifacts;
    a_link_leads_to_its_target needs Claims Artifacts Links;
    artifacts_are_taken_after_an_exception_and_refused_after_success needs Claims Artifacts;
    a_message_comes_back_with_a_higher_count_until_it_is_deleted needs Messages Redelivery;
    a_deleted_message_does_not_come_back needs Messages Redelivery;
    a_receipt_of_an_earlier_reception_is_refused needs Messages Redelivery;
    what_cannot_be_read_costs_the_batch_nothing_and_can_be_deleted needs Messages Garbage;
    lanes_are_found_again_and_receipts_stay_good needs Messages;
    a_full_batch_of_32_comes_at_once needs Messages;
}

fn refusal<T>(answer: Result<T, CallError>) -> Refusal {
    let refused = answer.err().expect("the call is refused");
    assert!(!refused.message.is_empty());
    refused.refusal
}

async fn a_task_is_claimed_with_its_definition_and_a_lease(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let payload = json!({ "number": 1, "text": "é\u{1F600}" });
    let task = bench.create(Spec { payload: payload.clone(), ..Spec::default() }).await;
    let taken = take_one(&*source).await;
    assert_eq!(taken.grant.run, Run { task: task.clone(), run: 0 });
    assert_eq!(taken.grant.claim.run(), &taken.grant.run);
    assert_eq!(taken.grant.task.json()["payload"], payload);
    let lease = taken.grant.lease.length;
    assert!(lease > Duration::from_secs(5) && lease <= Duration::from_secs(24 * 3600), "{lease:?}");
    assert_eq!(bench.states(&task).await, ["running"]);
}

async fn a_claimed_run_is_not_given_to_a_second_worker(bench: Arc<dyn Bench>) {
    let (first, second) = (bench.source("w1"), bench.source("w2"));
    let one = bench.create(Spec::default()).await;
    // Held: a source may take a claim that was dropped for one that is given back.
    let held = take_one(&*first).await;
    assert_eq!(held.grant.run.task, one);
    let two = bench.create(Spec::default()).await;
    assert_eq!(take_one(&*second).await.grant.run.task, two);
    drop(held);
}

async fn a_claim_by_message_is_idempotent_for_its_worker_and_gone_for_another(bench: Arc<dyn Bench>) {
    let (first, second) = (bench.source("w1"), bench.source("w2"));
    bench.create(Spec::default()).await;
    let run = receive(&*first, 1).await.remove(0).run.expect("it is about a run");
    let grant = messages(&*first).claim(&run).await.expect("it is granted");
    let again = messages(&*first).claim(&run).await.expect("it is granted again");
    assert_eq!(grant.run, again.run);
    assert_eq!(refusal(messages(&*second).claim(&run).await), Refusal::Gone);
    again.claim.report(Outcome::Completed).await.expect("it is accepted");
    assert_eq!(refusal(messages(&*first).claim(&run).await), Refusal::Gone);
}

async fn an_unknown_run_is_gone(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec::default()).await;
    let unknown = TaskId::parse("S2NL7euHSXSb2_FRd4pI_g").expect("a good id");
    for run in [Run { task, run: 7 }, Run { task: unknown, run: 0 }] {
        assert_eq!(refusal(messages(&*source).claim(&run).await), Refusal::Gone);
    }
}

async fn no_more_is_handed_out_than_was_asked_for(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let mut created = BTreeSet::new();
    for _ in 0..3 {
        created.insert(bench.create(Spec::default()).await);
    }
    // A claim that is dropped goes back to the queue.
    let mut held = Vec::new();
    for count in [2, 1] {
        // `take` checks every single answer against what was asked for.
        held.extend(take(&*source, count).await);
    }
    let taken: BTreeSet<_> = held.iter().map(|taken| taken.grant.run.task.clone()).collect();
    assert_eq!(taken, created);
}

async fn higher_priorities_come_first(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let mut expected = Vec::new();
    for priority in ["lowest", "medium", "highest"] {
        expected.insert(0, bench.create(Spec { priority, ..Spec::default() }).await);
    }
    let mut taken = Vec::new();
    for _ in 0..3 {
        taken.push(take_one(&*source).await.grant.run.task);
    }
    assert_eq!(taken, expected);
}

async fn runs_that_many_workers_compete_for_are_each_given_once(bench: Arc<dyn Bench>) {
    let mut created = BTreeSet::new();
    for _ in 0..12 {
        created.insert(bench.create(Spec::default()).await);
    }
    let mut workers = tokio::task::JoinSet::new();
    for worker in ["w1", "w2", "w3", "w4"] {
        let source = bench.source(worker);
        workers.spawn(async move {
            let taken = take(&*source, 3).await;
            taken.into_iter().map(|taken| taken.grant.run.task).collect::<Vec<_>>()
        });
    }
    let taken = workers.join_all().await.concat();
    assert_eq!(taken.len(), 12);
    assert_eq!(taken.into_iter().collect::<BTreeSet<_>>(), created);
}

async fn a_poll_that_waits_is_answered_when_a_task_appears(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let (taken, task) = tokio::join!(take_one(&*source), bench.create(Spec::default()));
    assert_eq!(taken.grant.run.task, task);
}

async fn a_reclaim_answers_with_a_lease_each_time(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec::default()).await;
    let grant = take_one(&*source).await.grant;
    for _ in 0..3 {
        let lease = grant.claim.renew().await.expect("it is granted").length;
        assert!(lease > Duration::from_secs(5), "{lease:?}");
        assert_eq!(grant.claim.lost_reason().await.expect("it is answered"), None);
    }
    grant.claim.report(Outcome::Completed).await.expect("it is accepted");
    assert_eq!(bench.states(&task).await, ["completed"]);
    assert_eq!(refusal(grant.claim.renew().await), Refusal::Gone);
}

async fn a_reclaimed_run_outlives_its_first_lease(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec::default()).await;
    let grant = take_one(&*source).await.grant;
    for _ in 0..3 {
        bench.pass(Span::MostOfALease).await;
        grant.claim.renew().await.expect("it is granted");
    }
    grant.claim.report(Outcome::Failed).await.expect("it is accepted");
    assert_eq!(bench.states(&task).await, ["failed"]);
}

async fn a_lease_that_ends_takes_the_run_away(bench: Arc<dyn Bench>) {
    let (first, second) = (bench.source("w1"), bench.source("w2"));
    let task = bench.create(Spec::default()).await;
    let taken = take_one(&*first).await;
    if let Some(message) = &taken.message {
        messages(&*first).delete(message).await.expect("it is deleted");
    }
    let claim = taken.grant.claim;
    bench.pass(Span::ALease).await;
    assert_eq!(bench.states(&task).await, ["exception/claim-expired", "pending"]);
    assert_eq!(claim.lost_reason().await.expect("it is answered"), Some(LossReason::Revoked));
    assert_eq!(refusal(claim.renew().await), Refusal::Gone);
    assert_eq!(refusal(claim.report(Outcome::Completed).await), Refusal::Gone);
    let next = take_one(&*second).await.grant;
    assert_eq!(next.run, Run { task, run: 1 });
}

async fn each_outcome_ends_the_run_as_the_queue_has_it(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let expected: [(Outcome, &[&str]); 7] = [
        (Outcome::Completed, &["completed"]),
        (Outcome::Failed, &["failed"]),
        (Outcome::Exception(ExceptionReason::MalformedPayload), &["exception/malformed-payload"]),
        (Outcome::Exception(ExceptionReason::ResourceUnavailable), &["exception/resource-unavailable"]),
        (Outcome::Exception(ExceptionReason::InternalError), &["exception/internal-error"]),
        (Outcome::Exception(ExceptionReason::WorkerShutdown), &["exception/worker-shutdown", "pending"]),
        (Outcome::Exception(ExceptionReason::IntermittentTask), &["exception/intermittent-task", "pending"]),
    ];
    for (outcome, states) in expected {
        let task = bench.create(Spec { priority: "highest", ..Spec::default() }).await;
        let grant = take_one(&*source).await.grant;
        assert_eq!(grant.run.task, task);
        assert!(grant.results.is_none_or(|results| results.deferral().is_none()), "it would take a deferral");
        assert_eq!(refusal(grant.claim.report(Outcome::Deferred).await), Refusal::Rejected);
        grant.claim.report(outcome).await.expect("it is accepted");
        assert_eq!(bench.states(&task).await, states, "{outcome}");
        // What waits to be run again must not be what the next turn takes.
        bench.cancel(&task).await;
    }
}

async fn a_repeated_outcome_is_accepted_and_another_is_gone(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let shutdown = Outcome::Exception(ExceptionReason::WorkerShutdown);
    let internal = Outcome::Exception(ExceptionReason::InternalError);
    for (outcome, other) in [(Outcome::Completed, Outcome::Failed), (Outcome::Failed, internal), (internal, shutdown)] {
        bench.create(Spec::default()).await;
        let claim = take_one(&*source).await.grant.claim;
        for _ in 0..2 {
            claim.report(outcome).await.expect("it is accepted");
        }
        assert_eq!(refusal(claim.report(other).await), Refusal::Gone, "{other} after {outcome}");
    }
}

async fn a_run_handed_back_comes_again_as_the_next_one(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec::default()).await;
    for run in 0..3 {
        let taken = take_one(&*source).await;
        assert_eq!(taken.grant.run, Run { task: task.clone(), run });
        let outcome = Outcome::Exception(ExceptionReason::WorkerShutdown);
        taken.grant.claim.report(outcome).await.expect("it is accepted");
        if let Some(message) = taken.message {
            messages(&*source).delete(&message).await.expect("it is deleted");
        }
    }
    assert_eq!(bench.states(&task).await.len(), 4);
}

async fn a_task_without_retries_is_not_run_again(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec { retries: 0, ..Spec::default() }).await;
    let grant = take_one(&*source).await.grant;
    assert_eq!(grant.terms.retries_left, Some(0));
    let claim = grant.claim;
    claim.report(Outcome::Exception(ExceptionReason::WorkerShutdown)).await.expect("it is accepted");
    assert_eq!(bench.states(&task).await, ["exception/worker-shutdown"]);
}

async fn a_canceled_run_is_told_and_gone(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let task = bench.create(Spec::default()).await;
    let claim = take_one(&*source).await.grant.claim;
    assert_eq!(claim.lost_reason().await.expect("it is answered"), None);
    bench.cancel(&task).await;
    assert_eq!(claim.lost_reason().await.expect("it is answered"), Some(LossReason::Canceled));
    assert_eq!(refusal(claim.renew().await), Refusal::Gone);
    assert_eq!(refusal(claim.report(Outcome::Completed).await), Refusal::Gone);
    assert_eq!(bench.states(&task).await, ["exception/canceled"]);
}

/// No claim is older.
const EVERY: Option<Duration> = Some(Duration::MAX);

async fn a_claim_whose_reply_was_lost_is_taken_over_by_its_worker_alone(bench: Arc<dyn Bench>) {
    let (first, second) = (bench.source("w1"), bench.source("w2"));
    let payload = json!({ "kept": "yes" });
    let task = bench.create(Spec { payload: payload.clone(), ..Spec::default() }).await;
    let held = bench.create(Spec::default()).await;
    let taken = take(&*first, 2).await;
    let kept: Vec<Run> = taken.into_iter().map(|taken| taken.grant.run).filter(|run| run.task == held).collect();
    // An older claim, or one of a worker that has lost no poll, is another worker's of the same id.
    let left = recovery(&*first).recover(&kept, None).await.expect("it is answered");
    assert_eq!((left.grants.len(), left.foreign_claims), (0, 1));
    assert!(recovery(&*second).recover(&[], EVERY).await.expect("it is answered").grants.is_empty());
    let found = recovery(&*first).recover(&kept, EVERY).await.expect("it is answered").grants;
    assert_eq!(found.len(), 1);
    let grant = &found[0];
    assert_eq!(grant.run, Run { task: task.clone(), run: 0 });
    assert_eq!(grant.task.json()["payload"], payload);
    grant.claim.renew().await.expect("it is granted");
    grant.claim.report(Outcome::Completed).await.expect("it is accepted");
    assert_eq!(bench.states(&task).await, ["completed"]);
    let both = [kept[0].clone(), grant.run.clone()];
    assert!(recovery(&*first).recover(&both, EVERY).await.expect("it is answered").grants.is_empty());
}

async fn what_an_earlier_life_claimed_is_taken_over_and_reported_once(bench: Arc<dyn Bench>) {
    let unknown = TaskId::parse("S2NL7euHSXSb2_FRd4pI_g").expect("a good id");
    for outcome in [Outcome::Completed, Outcome::Exception(ExceptionReason::WorkerShutdown)] {
        let earlier = bench.source("w1");
        let task = bench.create(Spec { retries: 0, ..Spec::default() }).await;
        let run = take_one(&*earlier).await.grant.run;
        assert_eq!(run.task, task);
        drop(earlier);
        // All that is known of it is the run: no message, no credentials.
        let later = bench.source("w1");
        let grant = recovery(&*later).take_over(&run).await.expect("it is still this worker's");
        assert_eq!(grant.run, run);
        let lease = grant.lease.length;
        assert!(lease > Duration::from_secs(5), "{lease:?}");
        grant.claim.renew().await.expect("it is granted");
        grant.claim.report(outcome).await.expect("it is accepted");
        let states = bench.states(&task).await;
        assert_eq!(states.len(), 1, "{states:?}");
        assert_ne!(states[0], "running");
        assert_eq!(refusal(recovery(&*later).take_over(&run).await), Refusal::Gone, "{outcome}: it is over");
    }
    let later = bench.source("w1");
    assert_eq!(refusal(recovery(&*later).take_over(&Run { task: unknown, run: 0 }).await), Refusal::Gone);
}

fn file(name: &str, content: &[u8]) -> Artifact {
    let mut file = tempfile::tempfile().expect("a file can be made");
    file.write_all(content).expect("a file can be written");
    let body = ArtifactBody::File {
        file: file.into(),
        bytes: content.len() as u64,
        content_type: "text/plain".into(),
        encoding: Default::default(),
    };
    Artifact { name: name.into(), expires: None, body }
}

async fn artifacts_are_stored_and_read_back(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let grant = take_one(&*source).await.grant;
    let large: Vec<u8> = (0..700_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for (name, content) in [("public/empty", &b""[..]), ("public/a b/small.txt", b"small"), ("public/large", &large)] {
        // Twice: a lost answer must not make the second attempt fail.
        for _ in 0..2 {
            grant.claim.upload(&file(name, content)).await.expect("it is stored");
        }
        assert!(bench.artifact(&grant.run, name).await == content, "{name} is read back as it was stored");
    }
    let missing = ArtifactBody::Error { reason: ArtifactErrorReason::Missing, message: "It is not there.".into() };
    let error = Artifact { name: "public/error".into(), expires: None, body: missing };
    grant.claim.upload(&error).await.expect("it is stored");
    grant.claim.report(Outcome::Completed).await.expect("it is accepted");
}

async fn a_link_leads_to_its_target(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let grant = take_one(&*source).await.grant;
    grant.claim.upload(&file("public/logs/backing.log", b"a log")).await.expect("it is stored");
    let body = ArtifactBody::Link { target: "public/logs/backing.log".into(), content_type: "text/plain".into() };
    let link = Artifact { name: "public/logs/live.log".into(), expires: None, body };
    grant.claim.upload(&link).await.expect("it is stored");
    assert_eq!(bench.artifact(&grant.run, "public/logs/live.log").await, b"a log");
}

async fn artifacts_are_taken_after_an_exception_and_refused_after_success(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let grant = take_one(&*source).await.grant;
    grant.claim.report(Outcome::Exception(ExceptionReason::InternalError)).await.expect("it is accepted");
    grant.claim.upload(&file("public/late", b"late")).await.expect("it is stored");
    assert_eq!(bench.artifact(&grant.run, "public/late").await, b"late");
    for outcome in [Outcome::Completed, Outcome::Failed] {
        bench.create(Spec::default()).await;
        let grant = take_one(&*source).await.grant;
        grant.claim.report(outcome).await.expect("it is accepted");
        assert_eq!(refusal(grant.claim.upload(&file("public/late", b"late")).await), Refusal::Gone);
    }
}

async fn delete(source: &dyn Source, message: &Message) -> Result<(), CallError> {
    messages(source).delete(message).await
}

async fn a_message_comes_back_with_a_higher_count_until_it_is_deleted(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let first = receive(&*source, 1).await.remove(0);
    assert_eq!(first.dequeue_count, 1);
    bench.pass(Span::AHiding).await;
    let second = receive(&*source, 1).await.remove(0);
    assert_eq!((&second.id, second.dequeue_count, &second.run), (&first.id, 2, &first.run));
    for _ in 0..2 {
        delete(&*source, &second).await.expect("it is deleted, and again when it is gone already");
    }
}

async fn a_deleted_message_does_not_come_back(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    bench.create(Spec::default()).await;
    let both = receive(&*source, 2).await;
    delete(&*source, &both[0]).await.expect("it is deleted");
    bench.pass(Span::AHiding).await;
    // The other one, received together with it, tells when both would be back.
    assert_eq!(receive(&*source, 1).await.remove(0).id, both[1].id);
    let lanes = source.open().await.expect("the lanes are found").priority_queues;
    for lane in (0..lanes).map(PriorityQueue) {
        let batch = source.poll(lane, 32).await.expect("the poll is answered");
        assert!(batch.messages.iter().all(|message| message.id != both[0].id));
    }
}

async fn a_receipt_of_an_earlier_reception_is_refused(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let first = receive(&*source, 1).await.remove(0);
    bench.pass(Span::AHiding).await;
    let second = receive(&*source, 1).await.remove(0);
    assert_eq!(refusal(delete(&*source, &first).await), Refusal::Rejected);
    delete(&*source, &second).await.expect("it is deleted");
}

async fn what_cannot_be_read_costs_the_batch_nothing_and_can_be_deleted(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    let mut created = BTreeSet::from([bench.create(Spec::default()).await]);
    bench.garbage().await;
    created.insert(bench.create(Spec::default()).await);
    let lanes = source.open().await.expect("the lanes are found").priority_queues;
    let (mut read, mut unread) = (BTreeSet::new(), Vec::new());
    for lane in (0..lanes).map(PriorityQueue) {
        let batch = source.poll(lane, 32).await.expect("the poll is answered");
        for message in batch.messages {
            match message.run {
                Ok(run) => drop(read.insert(run.task)),
                Err(_) => unread.push(message),
            }
        }
    }
    assert_eq!(read, created);
    assert_eq!(unread.len(), 1);
    assert_eq!(unread[0].dequeue_count, 1);
    messages(&*source).delete(&unread[0]).await.expect("it is deleted");
}

async fn lanes_are_found_again_and_receipts_stay_good(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    bench.create(Spec::default()).await;
    let message = receive(&*source, 1).await.remove(0);
    source.open().await.expect("the lanes are found again");
    delete(&*source, &message).await.expect("it is deleted");
}

async fn a_full_batch_of_32_comes_at_once(bench: Arc<dyn Bench>) {
    let source = bench.source("w1");
    for _ in 0..33 {
        bench.create(Spec::default()).await;
    }
    let lanes = source.open().await.expect("the lanes are found").priority_queues;
    let batch = source.poll(PriorityQueue(lanes - 1), 32).await.expect("the poll is answered");
    assert_eq!(batch.messages.len(), 32);
    let ids: BTreeSet<_> = batch.messages.iter().map(|message| &message.id).collect();
    assert_eq!(ids.len(), 32);
}
