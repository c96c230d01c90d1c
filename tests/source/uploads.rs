//! Artifact uploads.

use std::io::Write as _;

use journeyman::source::taskcluster::ArtifactStorage;
use journeyman::source::{Artifact, ArtifactBody};
use journeyman::task::ArtifactErrorReason;
use journeyman_domain::refusal::Refusal;
use serde_json::json;
use sha2::Digest as _;

use crate::source::support::{CANARY, RETRY, claimed, claimed_by, discreet, error};
use crate::support::gremlin::{Act, Gremlin, answer, json as say};

fn file(content: &[u8]) -> ArtifactBody {
    let mut file = tempfile::tempfile().expect("a file can be made");
    file.write_all(content).expect("a file can be written");
    ArtifactBody::File {
        file: file.into(),
        bytes: content.len() as u64,
        content_type: "text/x; a=\"b\"".into(),
        encoding: journeyman::task::ContentEncoding::Identity,
    }
}

fn artifact(body: ArtifactBody) -> Artifact {
    Artifact { name: "public/a b.txt".into(), expires: None, body }
}

fn s3(url: &str, place: &str) -> Act {
    let put_url = format!("{url}/bucket/{place}?X-Amz-Signature={CANARY}");
    say(200, &json!({ "storageType": "s3", "contentType": "text/x; a=\"b\"", "putUrl": put_url }))
}

fn large() -> Vec<u8> {
    (0..700_001_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

#[tokio::test]
async fn each_attempt_sends_the_whole_file_to_a_fresh_url() {
    let script = |url: &str| vec![s3(url, "first"), error(503, "SlowDown"), s3(url, "second"), answer(200, "", "")];
    let (gremlin, claim) = claimed(script).await;
    let content = large();
    let artifact = artifact(file(&content));
    assert_eq!(discreet(claim.upload(&artifact).await).refusal, RETRY);
    claim.upload(&artifact).await.expect("it is stored");
    let asked = gremlin.asked();
    let line = "POST /api/queue/v1/task/T/runs/0/artifacts/public%2Fa%20b.txt HTTP/1.1";
    assert_eq!((asked[1].line.as_str(), asked[3].line.as_str()), (line, line));
    let expires = "2030-01-01T00:00:00.000Z";
    let body =
        json!({ "storageType": "s3", "expires": expires, "contentType": "text/x; a=\"b\"", "contentLength": 700_001 });
    assert_eq!(asked[1].json(), body);
    assert!(asked[2].line.starts_with("PUT /bucket/first?X-Amz-Signature="));
    let put = &asked[4];
    assert!(put.line.starts_with("PUT /bucket/second?X-Amz-Signature="));
    assert_eq!(put.header("content-length"), Some("700001"));
    assert_eq!(put.header("transfer-encoding"), None);
    assert_eq!(put.header("content-type"), Some("text/x; a=\"b\""));
    assert_eq!(put.header("authorization"), None);
    assert!(put.body == content, "the content arrived whole");
}

#[tokio::test]
async fn b10_a_service_that_refuses_the_length_gets_none() {
    let (gremlin, claim) =
        claimed(|url| vec![error(400, "InputValidationError"), s3(url, "x"), answer(200, "", "")]).await;
    claim.upload(&artifact(file(b"12345"))).await.expect("it is stored");
    let asked = gremlin.asked();
    assert_eq!((&asked[1].json()["contentLength"], &asked[2].json()["contentLength"]), (&json!(5), &json!(null)));
}

#[tokio::test]
async fn an_empty_file_is_uploaded() {
    let (gremlin, claim) = claimed(|url| vec![s3(url, "x"), answer(200, "", "")]).await;
    claim.upload(&artifact(file(b""))).await.expect("it is stored");
    let put = gremlin.asked().remove(2);
    assert_eq!((put.header("content-length"), put.body.len()), (Some("0"), 0));
}

#[tokio::test]
async fn a_truncated_file_is_reported() {
    let (_gremlin, claim) = claimed(|url| vec![s3(url, "x"), Act::Silence]).await;
    let ArtifactBody::File { file, bytes, content_type, encoding } = file(b"0123456789") else { unreachable!() };
    file.set_len(4).expect("a file can be cut");
    let refused = discreet(claim.upload(&artifact(ArtifactBody::File { file, bytes, content_type, encoding })).await);
    assert_eq!(refused.refusal, Refusal::Rejected);
    assert!(refused.message.contains("truncated at byte 4 of 10"), "{refused}");
}

#[tokio::test]
async fn storage_errors_are_classified() {
    let throttled = Refusal::Throttled { retry_after: None };
    for (status, refusal) in [
        (400, RETRY),
        (403, RETRY),
        (404, RETRY),
        (413, Refusal::Rejected),
        (429, throttled),
        (500, RETRY),
        (301, RETRY),
    ] {
        let (_gremlin, claim) = claimed(|url| vec![s3(url, "x"), answer(status, "", CANARY)]).await;
        let refused = discreet(claim.upload(&artifact(file(b"x"))).await);
        assert_eq!(refused.refusal, refusal, "{status}: {refused}");
    }
}

#[tokio::test]
async fn a1_a_full_disk_is_told_apart_with_its_reason() {
    let reason = "disk full: the queue cannot store the artifact";
    let full = answer(507, "text/plain; charset=utf-8", format!("{reason}\n"));
    let created = say(507, &json!({ "code": "InsufficientStorage", "message": reason }));
    let (_gremlin, claim) = claimed(|url| vec![s3(url, "x"), full, created]).await;
    for _ in 0..2 {
        let refused = discreet(claim.upload(&artifact(file(b"x"))).await);
        assert_eq!(refused.refusal, Refusal::Full);
        assert!(refused.message.contains("507") && refused.message.contains(reason), "{refused}");
    }
}

#[tokio::test]
async fn an_upload_url_of_a_metadata_service_is_rejected() {
    let bad = say(200, &json!({ "putUrl": "http://169.254.169.254/latest", "contentType": "text/plain" }));
    let (_gremlin, claim) = claimed(|_| vec![bad]).await;
    let refused = discreet(claim.upload(&artifact(file(b"x"))).await);
    assert!(refused.message.contains("not allowed"), "{refused}");
}

#[tokio::test]
async fn a_host_with_a_private_address_is_rejected_unless_allowed() {
    // The configured host is 127.0.0.1; this is another one.
    let named = |url: &str| vec![s3(&url.replace("127.0.0.1", "localhost"), "place"), answer(200, "", "")];
    let (gremlin, claim) = claimed(named).await;
    let refused = discreet(claim.upload(&artifact(file(b"x"))).await);
    assert!(refused.message.contains("set allow_hosts = [\"localhost\"]"), "{refused}");
    assert_eq!(gremlin.asked().len(), 2);

    let allow = |settings: &mut journeyman::source::taskcluster::Config| {
        settings.api.allow_hosts = vec!["localhost".into()];
    };
    let (gremlin, claim) = claimed_by(named, allow).await;
    claim.upload(&artifact(file(b"x"))).await.expect("it is stored");
    assert!(gremlin.asked()[2].line.starts_with("PUT /bucket/place"));
}

#[tokio::test]
async fn links_and_errors_need_one_call() {
    let link = ArtifactBody::Link { target: "public/b".into(), content_type: "text/plain".into() };
    let missing = ArtifactBody::Error { reason: ArtifactErrorReason::Missing, message: "It is not there.".into() };
    let expires = "2030-01-01T00:00:00.000Z";
    let text = "text/plain";
    let expected = [
        (link, json!({ "storageType": "link", "expires": expires, "contentType": text, "artifact": "public/b" })),
        (
            missing,
            json!({ "storageType": "error", "expires": expires, "reason": "file-missing-on-worker", "message": "It is not there." }),
        ),
    ];
    for (body, expected) in expected {
        let (gremlin, claim) = claimed(|_| vec![say(200, &json!({}))]).await;
        claim.upload(&artifact(body)).await.expect("it is stored");
        let asked = gremlin.asked();
        assert_eq!(asked.len(), 2);
        assert_eq!(asked[1].json(), expected);
    }
}

#[tokio::test]
async fn an_artifact_may_have_its_own_expiry() {
    let (gremlin, claim) = claimed(|url| vec![s3(url, "x"), answer(200, "", "")]).await;
    let mut artifact = artifact(file(b"x"));
    artifact.expires = Some("2027-01-01T00:00:00Z".into());
    claim.upload(&artifact).await.expect("it is stored");
    assert_eq!(gremlin.asked()[1].json()["expires"], "2027-01-01T00:00:00Z");
}

fn object(script: Vec<Act>) -> impl FnOnce(&str) -> Vec<Act> {
    let announced = json!({
        "storageType": "object",
        "name": "t/T/0/public/a b.txt",
        "projectId": "none",
        "uploadId": "U",
        "expires": "2030-01-01T00:00:00.000Z",
        "credentials": { "clientId": "upload", "accessToken": CANARY },
    });
    move |_| [vec![say(200, &announced)], script].concat()
}

fn hashes(content: &[u8]) -> serde_json::Value {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    json!({ "sha256": hex(&sha2::Sha256::digest(content)), "sha512": hex(&sha2::Sha512::digest(content)) })
}

async fn stored_object(script: Vec<Act>, content: &[u8]) -> (Gremlin, Result<(), journeyman::source::CallError>) {
    let by_object = |settings: &mut journeyman::source::taskcluster::Config| {
        settings.artifact_storage = ArtifactStorage::Object;
    };
    let (gremlin, claim) = claimed_by(object(script), by_object).await;
    let answer = claim.upload(&artifact(file(content))).await;
    (gremlin, answer)
}

#[tokio::test]
async fn an_object_is_sent_to_the_put_url_and_finished() {
    let storage = Gremlin::start(|_| vec![answer(200, "", "")]).await;
    let put_url = json!({
        "url": format!("{}/bucket?sig={CANARY}", storage.url()),
        "expires": "2030-01-01T00:00:00Z",
        "headers": { "content-type": "text/x", "x-amz-meta": "y" },
    });
    let chosen = say(200, &json!({ "uploadMethod": { "putUrl": put_url } }));
    let content = large();
    let (gremlin, stored) = stored_object(vec![chosen, say(200, &json!({})), answer(204, "", "")], &content).await;
    stored.expect("it is stored");
    let put = storage.asked().remove(0);
    assert!(put.body == content, "the content arrived whole");
    assert_eq!((put.header("content-type"), put.header("x-amz-meta")), (Some("text/x"), Some("y")));
    assert_eq!(put.header("authorization"), None);
    let asked = gremlin.asked();
    assert_eq!(asked[2].line, "PUT /api/object/v1/upload/t%2FT%2F0%2Fpublic%2Fa%20b.txt HTTP/1.1");
    assert_eq!(asked[2].json()["proposedUploadMethods"]["putUrl"]["contentLength"], 700_001);
    assert!(asked[2].header("authorization").expect("it is signed").contains("id=\"upload\""));
    assert_eq!(asked[3].line, "POST /api/object/v1/finish-upload/t%2FT%2F0%2Fpublic%2Fa%20b.txt HTTP/1.1");
    let finish = json!({ "projectId": "none", "uploadId": "U", "hashes": hashes(&content) });
    assert_eq!(asked[3].json(), finish);
    assert_eq!(asked[4].line, "PUT /api/queue/v1/task/T/runs/0/artifacts/public%2Fa%20b.txt HTTP/1.1");
    assert_eq!(asked[4].json(), json!({ "uploadId": "U" }));
    assert!(asked[4].header("authorization").expect("it is signed").contains("task-client/first"));
}

#[tokio::test]
async fn an_object_without_an_accepted_method_is_retried() {
    let (_gremlin, stored) = stored_object(vec![say(200, &json!({ "uploadMethod": {} }))], b"x").await;
    assert_eq!(discreet(stored).refusal, RETRY);
}
