//! Claim calls: what is signed and sent, and how responses are classified.

use std::sync::Arc;
use std::time::Duration;

use crate::source::support::{
    CANARY, RETRY, claim, claimed, discreet, error, only, poll, polled, reclaim, run, settings, source,
};
use crate::support::gremlin::{Act, Asked, Gremlin, answer_with, date, json as say};
use journeyman::source::taskcluster::{Dialect, Taskcluster};
use journeyman::source::{CallError, LossReason, MessageQueue as _, Recovery as _, RecoveryBatch, Source as _};
use journeyman_domain::id::PriorityQueue;
use journeyman_domain::outcome::{ExceptionReason, Outcome};
use journeyman_domain::refusal::Refusal;
use serde_json::json;
use tokio::sync::Notify;

fn signer(asked: &Asked) -> hawk::Header {
    let value = asked.header("authorization").expect("the request is signed");
    value.strip_prefix("Hawk ").expect("by Hawk").parse().expect("as Hawk has it")
}

#[tokio::test]
async fn a_poll_requests_the_free_slots_and_returns_claims() {
    let (gremlin, claim) = claimed(|_| vec![]).await;
    assert_eq!(claim.run(), &run("T", 0));
    let asked = &gremlin.asked()[0];
    assert_eq!(asked.line, "POST /api/queue/v1/claim-work/prov%2Fwt HTTP/1.1");
    assert_eq!(asked.json(), json!({ "workerGroup": "wg", "workerId": "w1", "tasks": 4 }));
    assert_eq!(asked.header("content-type"), Some("application/json"));
    let signer = signer(asked);
    assert_eq!(signer.id.as_deref(), Some("worker/own"));
    let key = hawk::Key::new(format!("{CANARY}-own-token"), hawk::SHA256).expect("a key");
    let path = "/api/queue/v1/claim-work/prov%2Fwt";
    let request = hawk::RequestBuilder::new("POST", "127.0.0.1", gremlin.address.port(), path).request();
    assert!(request.validate_header(&signer, &key, Duration::from_secs(60)));
}

#[tokio::test]
async fn an_invalid_claim_does_not_affect_the_others() {
    let mut foreign = claim("F", 0);
    foreign["workerId"] = json!("w2");
    let mut timeless = claim("L", 0);
    timeless["takenUntil"] = json!("2001-01-01T00:00:00Z");
    timeless["credentials"].as_object_mut().expect("an object").remove("certificate");
    let tasks = json!({ "tasks": [foreign, { "x": 1 }, claim("T", 0), timeless] });
    let batch = polled(say(200, &tasks)).await.expect("the poll is answered");
    assert_eq!(batch.grants.len(), 1);
    assert!(!format!("{:?}", batch.messages).contains(CANARY));
    assert!(batch.messages[0].run.as_ref().is_err_and(|why| why.contains("another worker")), "{:?}", batch.messages);
    let named: Vec<_> = batch.messages.iter().map(|entry| &*entry.id).collect();
    assert_eq!(named, ["F/0", "unknown task", "L/0"]);
}

#[tokio::test]
async fn surplus_claims_are_accepted_up_to_the_protocol_limit() {
    let tasks = |count| (0..count).map(|run| claim("T", run)).collect::<Vec<_>>();
    let batch = polled(say(200, &json!({ "tasks": tasks(5) }))).await.expect("the poll is answered");
    assert_eq!(batch.grants.len(), 5, "none is dropped: the rules hand the fifth back");
    let refused = discreet(polled(say(200, &json!({ "tasks": tasks(33) }))).await);
    assert_eq!(refused.refusal, RETRY);
    assert!(refused.message.contains("asked for 4"), "{refused}");
}

#[tokio::test]
async fn the_lease_is_computed_from_the_services_clock() {
    for shift_s in [-3 * 3600, 0, 3 * 3600] {
        let mut granted = claim("T", 0);
        let until = jiff::Timestamp::now() + jiff::SignedDuration::from_secs(shift_s + 1200);
        granted["takenUntil"] = json!(until.to_string());
        granted["credentials"].as_object_mut().expect("an object").remove("certificate");
        let body = json!({ "tasks": [granted] }).to_string();
        let headers = [("content-type", "application/json"), ("date", &date(shift_s))];
        let batch = polled(answer_with(200, &headers, body)).await.expect("the poll is answered");
        let lease = batch.grants[0].lease.length.as_secs();
        assert!((1190..=1200).contains(&lease), "{lease} s with a clock {shift_s} s apart");
    }
}

#[tokio::test]
async fn a_rejected_signature_names_the_clock_difference() {
    let body = json!({ "code": "AuthenticationFailed", "message": "Unauthorized: Stale timestamp" }).to_string();
    for (shift_s, named) in [(3 * 3600, true), (0, false)] {
        let headers = [("content-type", "application/json"), ("date", &date(shift_s))];
        let refused = discreet(polled(answer_with(401, &headers, body.clone())).await);
        assert_eq!(refused.refusal, Refusal::Denied);
        assert_eq!(refused.message.contains("this host's clock is off"), named, "{refused}");
    }
}

#[tokio::test]
async fn claim_task_sends_the_worker_identity() {
    let gremlin = Gremlin::start(|_| vec![say(200, &claim("T", 0))]).await;
    let grant = source(&gremlin.url(), Dialect::Azure).claim(&run("T", 0)).await.expect("it is granted");
    assert_eq!(grant.run, run("T", 0));
    let asked = &gremlin.asked()[0];
    assert_eq!(asked.line, "POST /api/queue/v1/task/T/runs/0/claim HTTP/1.1");
    assert_eq!(asked.json(), json!({ "workerGroup": "wg", "workerId": "w1" }));
}

#[tokio::test]
async fn claim_task_errors_are_classified() {
    let throttled = Refusal::Throttled { retry_after: None };
    for (statuses, refusal) in [
        (&[400][..], Refusal::Rejected),
        (&[401, 403], Refusal::Denied),
        (&[404, 409, 410, 413, 424], Refusal::Gone),
        (&[408, 429], throttled),
        (&[500, 503], RETRY),
    ] {
        for status in statuses.iter().copied() {
            let gremlin = Gremlin::start(|_| vec![error(status, "Code")]).await;
            let refused = discreet(source(&gremlin.url(), Dialect::Azure).claim(&run("T", 0)).await);
            assert_eq!(refused.refusal, refusal, "{status}: {refused}");
            assert_eq!(refused.message, format!("claimTask T/0: {status} Code: It is so."));
        }
    }
}

#[tokio::test]
async fn a_grant_for_another_run_is_rejected() {
    let mut foreign = claim("T", 0);
    foreign["workerGroup"] = json!("other");
    for body in [claim("U", 0), claim("T", 1), foreign, json!({}), json!([])] {
        let gremlin = Gremlin::start(|_| vec![say(200, &body)]).await;
        let refused = discreet(source(&gremlin.url(), Dialect::Azure).claim(&run("T", 0)).await);
        assert_eq!(refused.refusal, RETRY, "{refused}");
    }
}

#[tokio::test]
async fn a_reclaim_replaces_the_credentials_of_every_later_call() {
    let done = json!({ "status": { "taskId": "T" } });
    let script = vec![say(200, &reclaim("T", 0, "second")), say(200, &reclaim("T", 0, "third")), say(200, &done)];
    let (gremlin, claim) = claimed(|_| script).await;
    for _ in 0..2 {
        let lease = claim.renew().await.expect("it is granted").length.as_secs();
        assert!((1190..=1200).contains(&lease), "{lease}");
    }
    claim.report(Outcome::Completed).await.expect("it is accepted");
    let signers: Vec<_> = gremlin.asked()[1..].iter().map(|asked| signer(asked).id.expect("an id")).collect();
    assert_eq!(signers, ["task-client/first", "task-client/second", "task-client/third"]);
    let asked = gremlin.asked();
    assert_eq!(asked[1].line, "POST /api/queue/v1/task/T/runs/0/reclaim HTTP/1.1");
    assert!(asked[1].body.is_empty());
    assert!(signer(&asked[1]).ext.is_some());
}

#[tokio::test]
async fn reclaim_errors_are_definite_only_if_the_run_is_gone_or_denied() {
    let expected = [
        (400, RETRY),
        (401, Refusal::Denied),
        (403, Refusal::Denied),
        (404, Refusal::Gone),
        (409, Refusal::Gone),
        (413, RETRY),
        (429, Refusal::Throttled { retry_after: None }),
        (500, RETRY),
    ];
    for (status, refusal) in expected {
        let (gremlin, claim) = claimed(|_| vec![error(status, "Code")]).await;
        let refused = discreet(claim.renew().await);
        assert_eq!(refused.refusal, refusal, "{status}: {refused}");
        // The adapter does not retry with other credentials.
        assert_eq!(gremlin.asked().len(), 2);
    }
}

#[tokio::test]
async fn each_outcome_is_reported_by_its_call() {
    let exception = |reason| (Outcome::Exception(reason), "exception");
    let outcomes = [
        (Outcome::Completed, "completed"),
        (Outcome::Failed, "failed"),
        exception(ExceptionReason::WorkerShutdown),
        exception(ExceptionReason::MalformedPayload),
        exception(ExceptionReason::ResourceUnavailable),
        exception(ExceptionReason::InternalError),
        exception(ExceptionReason::IntermittentTask),
    ];
    for (outcome, call) in outcomes {
        let (gremlin, claim) = claimed(|_| vec![say(200, &json!({ "status": { "taskId": "T" } }))]).await;
        claim.report(outcome).await.expect("it is accepted");
        let asked = gremlin.asked().remove(1);
        assert_eq!(asked.line, format!("POST /api/queue/v1/task/T/runs/0/{call} HTTP/1.1"));
        match outcome {
            Outcome::Exception(reason) => assert_eq!(asked.json(), json!({ "reason": reason.as_str() })),
            Outcome::Completed | Outcome::Failed | Outcome::Deferred => assert!(asked.body.is_empty()),
        }
    }
}

#[tokio::test]
async fn report_errors_are_classified() {
    let expected =
        [(400, Refusal::Rejected), (401, Refusal::Denied), (404, Refusal::Gone), (409, Refusal::Gone), (500, RETRY)];
    for (status, refusal) in expected {
        let (_gremlin, claim) = claimed(|_| vec![error(status, "Code")]).await;
        let refused = discreet(claim.report(Outcome::Failed).await);
        assert_eq!(refused.refusal, refusal, "{status}: {refused}");
    }
}

#[tokio::test]
async fn a_report_is_accepted_only_by_the_queue() {
    let page = answer_with(200, &[("content-type", "text/html")], b"<html>please log in</html>");
    for answer in [page, say(200, &json!({})), say(200, &json!({ "status": { "taskId": "U" } }))] {
        let (_gremlin, claim) = claimed(|_| vec![answer]).await;
        assert_eq!(discreet(claim.report(Outcome::Completed).await).refusal, RETRY);
    }
}

#[tokio::test]
async fn a_claim_with_an_unreadable_payload_is_granted_with_the_reason() {
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    for payload in [r#"{"command":[["echo","CANARY\ud800"]]}"#, r#"{"a":1e999}"#, &deep] {
        let tasks = |entry: serde_json::Value| {
            let body = json!({ "tasks": [entry, claim("U", 0)] }).to_string();
            answer_with(
                200,
                &[("content-type", "application/json")],
                body.replace("\"payload\":{}", &format!("\"payload\":{payload}")).into_bytes(),
            )
        };
        let batch = polled(tasks(claim("T", 0))).await.expect("it is answered");
        assert!(batch.messages.is_empty());
        let grant = batch.grants.into_iter().next().expect("a claim");
        assert_eq!(
            (grant.run.clone(), &grant.task.json()["expires"]),
            (run("T", 0), &json!("2030-01-01T00:00:00.000Z"))
        );
        let why = grant.payload_error.expect("it says why");
        assert!(grant.task.json().get("payload").is_none() && !why.contains("CANARY"), "{why}");
    }
}

#[tokio::test]
async fn b9_the_status_of_a_run_tells_why_this_worker_has_lost_it() {
    let seen = |state: &str, id: &str, reason: Option<&str>| json!({ "runId": 0, "state": state, "workerGroup": "wg", "workerId": id, "reasonResolved": reason });
    let expected = [
        (seen("running", "w1", None), None),
        (seen("running", "w2", None), Some(LossReason::Revoked)),
        (seen("exception", "w1", Some("claim-expired")), Some(LossReason::Revoked)),
        (seen("exception", "w1", Some("canceled")), Some(LossReason::Canceled)),
        (seen("exception", "w1", Some("deadline-exceeded")), Some(LossReason::DeadlineExceeded)),
        (seen("completed", "w1", Some("completed")), Some(LossReason::Revoked)),
    ];
    for (run, loss) in expected {
        let status = json!({ "status": { "taskId": "T", "runs": [run] } });
        let (gremlin, claim) = claimed(|_| vec![say(200, &status)]).await;
        assert_eq!(claim.lost_reason().await.expect("it is answered"), loss);
        assert_eq!(gremlin.asked()[1].line, "GET /api/queue/v1/task/T/status HTTP/1.1");
    }
    let (_gremlin, claim) = claimed(|_| vec![error(404, "ResourceNotFound")]).await;
    assert_eq!(discreet(claim.lost_reason().await).refusal, Refusal::Gone);
}

async fn recovered(script: Vec<Act>, newer_than: Duration) -> (Gremlin, Result<RecoveryBatch, CallError>) {
    let gremlin = Gremlin::start(|_| script).await;
    let source = source(&gremlin.url(), Dialect::ClaimWork);
    let found = source.recover(&[run("H", 0)], Some(newer_than)).await;
    (gremlin, found)
}

fn listed(task: &str, id: &str) -> serde_json::Value {
    let claimed = jiff::Timestamp::now().to_string();
    json!({
        "taskId": task, "runId": 0, "workerGroup": "wg", "workerId": id, "claimed": claimed, "task": { "payload": {} },
    })
}

#[tokio::test]
async fn claims_made_outside_the_poll_windows_are_counted_and_not_taken_over() {
    // The service's clock is hours off.
    let shift_s = 3 * 3600;
    let at = |ago: i64| (jiff::Timestamp::now() + jiff::SignedDuration::from_secs(shift_s - ago)).to_string();
    let claimed = |task: &str, when: Option<String>| {
        let mut entry = listed(task, "w1");
        entry["claimed"] = when.map_or(serde_json::Value::Null, Into::into);
        entry
    };
    let tasks = [
        claimed("early", Some(at(110))),
        claimed("lost", Some(at(90))),
        claimed("timeless", None),
        listed("other", "w2"),
    ];
    let page = json!({ "tasks": tasks }).to_string();
    let headers = [("content-type", "application/json"), ("date", &date(shift_s))];
    let page = answer_with(200, &headers, page);
    let script = vec![page, say(200, &reclaim("lost", 0, "adopted"))];
    let (gremlin, found) = recovered(script, Duration::from_secs(100)).await;
    let found = found.expect("it is answered");
    let runs: Vec<String> = found.grants.iter().map(|grant| grant.run.to_string()).collect();
    assert_eq!((runs, found.foreign_claims), (vec!["lost/0".to_owned()], 2));
    assert_eq!(gremlin.asked().len(), 2, "foreign claims are not reclaimed");
}

#[tokio::test]
async fn claims_with_a_lost_response_are_found_on_all_pages_and_taken_over() {
    let token = "a/b+c&d=";
    let first = json!({ "tasks": [listed("A", "w2"), listed("H", "w1")], "continuationToken": token });
    let mut bare = listed("O", "w1");
    bare.as_object_mut().expect("an object").remove("task");
    let script = vec![
        say(200, &first),
        say(200, &json!({ "tasks": [bare, listed("G", "w1")] })),
        say(200, &json!({ "payload": "of O" })),
        say(200, &reclaim("O", 0, "adopted")),
        error(409, "RequestConflict"),
    ];
    let (gremlin, found) = recovered(script, Duration::MAX).await;
    let grants = found.expect("it is answered").grants;
    assert_eq!(grants.len(), 1);
    assert_eq!((&grants[0].run, &grants[0].task.json()["payload"]), (&run("O", 0), &json!("of O")));
    let asked = gremlin.asked();
    let base = "/api/queue/v1/task-queues/prov%2Fwt/claimed?limit=100";
    assert_eq!(asked[0].line, format!("GET {base} HTTP/1.1"));
    let second = format!("{base}&continuationToken=a%2Fb%2Bc%26d%3D");
    assert_eq!(asked[1].line, format!("GET {second} HTTP/1.1"));
    let key = hawk::Key::new(format!("{CANARY}-own-token"), hawk::SHA256).expect("a key");
    let request = hawk::RequestBuilder::new("GET", "127.0.0.1", gremlin.address.port(), &second).request();
    assert!(request.validate_header(&signer(&asked[1]), &key, Duration::from_secs(60)), "the query is signed");
    assert_eq!(asked[2].line, "GET /api/queue/v1/task/O HTTP/1.1");
    assert_eq!(signer(&asked[3]).id.as_deref(), Some("worker/own"));
    assert_eq!(asked.len(), 5);
}

#[tokio::test]
async fn b13_an_unwanted_poll_is_closed_and_a_claim_granted_in_that_moment_is_taken_over() {
    let script = vec![
        say(200, &json!({ "tasks": [] })),
        Act::Silence,
        say(200, &json!({ "tasks": [listed("T", "w1")] })),
        say(200, &reclaim("T", 0, "adopted")),
    ];
    let gremlin = Gremlin::start(|_| script).await;
    let source = source(&gremlin.url(), Dialect::ClaimWork);
    source.recover(&[], None).await.expect("the claims can be listed");
    let closing = async {
        gremlin.wait_asked(|asked| asked.len() == 2).await;
        source.pause();
    };
    let (batch, ()) = tokio::join!(poll(&source), closing);
    assert_eq!(only(batch.expect("it is answered")).run, run("T", 0));
}

#[tokio::test]
async fn b13_an_unwanted_poll_is_waited_for_where_claims_cannot_be_listed() {
    let (sent, answered) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (is_sent, may_answer) = (Arc::clone(&sent), Arc::clone(&answered));
    let gremlin = Gremlin::responding(move |asked| {
        let (is_sent, may_answer) = (Arc::clone(&is_sent), Arc::clone(&may_answer));
        let listing = asked.line.contains("/claimed");
        Box::pin(async move {
            if listing {
                return error(403, "InsufficientScopes");
            }
            is_sent.notify_one();
            may_answer.notified().await;
            say(200, &json!({ "tasks": [claim("T", 0)] }))
        })
    })
    .await;
    let source = source(&gremlin.url(), Dialect::ClaimWork);
    assert_eq!(source.recover(&[], None).await.expect_err("it is refused").refusal, Refusal::Denied);
    let unwanted = async {
        sent.notified().await;
        source.pause();
        answered.notify_one();
    };
    let (batch, ()) = tokio::join!(poll(&source), unwanted);
    assert_eq!(only(batch.expect("it is answered")).run, run("T", 0), "the claim is not lost");
}

#[tokio::test]
async fn a_failed_takeover_does_not_drop_the_others() {
    let page = json!({ "tasks": [listed("O", "w1"), listed("P", "w1")] });
    let script = vec![say(200, &page), say(200, &reclaim("O", 0, "adopted")), error(500, "InternalServerError")];
    let found = recovered(script, Duration::MAX).await.1.expect("it is answered");
    assert_eq!(found.grants.len(), 1);
    assert_eq!(found.error.expect("it says so").refusal, RETRY);
}

#[tokio::test]
async fn an_endless_listing_is_cut() {
    let page = json!({ "tasks": [], "continuationToken": "again" });
    let (gremlin, found) = recovered(vec![say(200, &page)], Duration::MAX).await;
    assert!(found.expect("it is answered").grants.is_empty());
    assert_eq!(gremlin.asked().len(), journeyman_domain::limits::LISTING_PAGES_MAX);
}

#[tokio::test]
async fn missing_scopes_for_recovery_are_named() {
    let page = json!({ "tasks": [listed("O", "w1")] });
    for script in [vec![error(403, "InsufficientScopes")], vec![say(200, &page), error(403, "InsufficientScopes")]] {
        let refused = discreet(recovered(script, Duration::MAX).await.1);
        assert_eq!(refused.refusal, Refusal::Denied);
        assert!(refused.message.contains("queue:claimed-list:prov/wt"), "{refused}");
        assert!(refused.message.contains("queue:reclaim-task:*"), "{refused}");
    }
    let refused = discreet(recovered(vec![error(401, "AuthenticationFailed")], Duration::MAX).await.1);
    assert_eq!(refused.refusal, Refusal::Denied);
    assert!(!refused.message.contains("scopes"), "{refused}");
}

#[tokio::test]
async fn settings_beyond_protocol_limits_are_rejected_by_name() {
    let long = "x".repeat(23);
    let refusal = |change: &dyn Fn(&mut journeyman::source::taskcluster::Config)| {
        let mut settings = settings("http://127.0.0.1:1", Dialect::Azure);
        change(&mut settings);
        Taskcluster::new(settings).err().expect("the settings are refused").to_string()
    };
    assert!(refusal(&|settings| settings.worker_id.clone_from(&long)).starts_with("worker_id: "));
    assert!(refusal(&|settings| settings.worker_group = "a b".into()).starts_with("worker_group: "));
    assert!(refusal(&|settings| settings.task_queue = "one".into()).starts_with("task_queue: "));
    assert!(refusal(&|settings| settings.api.root_url = "tc.example.com".into()).starts_with("root_url: "));
    assert!(refusal(&|settings| settings.api.root_url = "http://u:p@h".into()).starts_with("root_url: "));
    let mut modern = settings("http://127.0.0.1:1", Dialect::ClaimWork);
    modern.worker_id = long;
    assert!(Taskcluster::new(modern).is_ok());
}

#[tokio::test]
async fn b10_a_poll_without_tasks_finds_out_that_the_worker_is_in_quarantine() {
    let worker = json!({ "quarantineUntil": "3017-11-21T08:52:20.024Z" });
    let script =
        |_: &str| vec![say(200, &json!({ "tasks": [] })), say(200, &worker), say(200, &json!({ "tasks": [] }))];
    let gremlin = Gremlin::start(script).await;
    let source = source(&gremlin.url(), Dialect::ClaimWork);
    for _ in 0..2 {
        source.poll(PriorityQueue(0), 1).await.expect("no tasks");
    }
    let until = source.quarantined_until().expect("in quarantine");
    assert!(until.to_string().starts_with("3017-11-21"), "{until}");
    assert!(gremlin.asked()[1].line.starts_with("GET /api/queue/v1/provisioners/"), "{}", gremlin.asked()[1].line);
    assert_eq!(gremlin.asked().len(), 3, "asked again only after minutes");
}

#[tokio::test]
async fn b11_without_the_scope_to_read_a_tasks_status_it_is_read_once() {
    let denied = json!({ "code": "InsufficientScopes", "message": "no" });
    let (gremlin, claim) = claimed(|_| vec![say(403, &denied)]).await;
    for _ in 0..3 {
        assert_eq!(claim.lost_reason().await.expect("unknown counts as no"), None);
    }
    assert_eq!(gremlin.asked().len(), 2);
}

#[tokio::test]
async fn a4_a_poll_is_not_sent_while_its_source_is_paused() {
    let script = vec![say(200, &json!({ "tasks": [claim("T", 0)] }))];
    let gremlin = Gremlin::start(|_| script).await;
    let source = source(&gremlin.url(), Dialect::ClaimWork);
    // The worker stops after it has decided to poll, and before the poll begins.
    source.pause();
    let batch = poll(&source).await.expect("nothing is wrong");
    assert_eq!((batch.grants.len(), gremlin.asked().len()), (0, 0), "{batch:?}");
    source.resume();
    assert_eq!(only(poll(&source).await.expect("it is answered")).run, run("T", 0));
}
