//! Fuzz targets for everything a queue sends. Each asserts what must hold for any input.

use jiff::Timestamp;

use super::address_policy::AddressPolicy;
use super::artifact::{WireMethod, WireObject, WireS3, WireUpload};
use super::azure;
use super::error_response::{ErrorResponse, classify_service_error};
use super::wire::{WireClaim, WireClaimedPage, WireClaims, WireStatusReply, WorkerIdentity};
use journeyman_domain::limits::{LEASE_MAX, REFUSAL_TEXT_BYTES_MAX};
use journeyman_platform::http::address::{Range, classify};

pub fn poll_response(bytes: &[u8]) {
    azure::fuzz_poll_response(&String::from_utf8_lossy(bytes));
}

pub fn message_text(bytes: &[u8]) {
    azure::fuzz_message_text(&String::from_utf8_lossy(bytes));
}

pub fn claim(bytes: &[u8]) {
    let worker = WorkerIdentity { group: "wg".into(), id: "w1".into() };
    let date = Timestamp::UNIX_EPOCH;
    if let Ok(claims) = serde_json::from_slice::<WireClaims>(bytes) {
        for entry in claims.tasks {
            if let Ok(Ok(claim)) =
                serde_json::from_str::<WireClaim>(entry.get()).map(|claim| claim.check(&worker, date))
            {
                assert!(!claim.lease.is_zero() && claim.lease <= LEASE_MAX);
            }
        }
    }
    if let Ok(Ok(claim)) = serde_json::from_slice::<WireClaim>(bytes).map(|claim| claim.check(&worker, date)) {
        assert!(!claim.lease.is_zero() && claim.lease <= LEASE_MAX);
    }
    drop(serde_json::from_slice::<WireStatusReply>(bytes));
    drop(serde_json::from_slice::<WireClaimedPage>(bytes));
    drop(serde_json::from_slice::<WireS3>(bytes));
    drop(serde_json::from_slice::<WireObject>(bytes));
    drop(serde_json::from_slice::<WireUpload>(bytes));
    drop(serde_json::from_slice::<WireMethod>(bytes));
    for status in [400, 404, 500] {
        let response =
            ErrorResponse { status, retry_after: None, content_type: "text/html".into(), body: bytes.to_vec() };
        let message = classify_service_error("op", &response).message;
        assert!(
            !message.contains(['\n', '\r', '\u{1b}']) && message.len() <= 4 * REFUSAL_TEXT_BYTES_MAX,
            "{message:?}"
        );
    }
}

pub fn signed_url(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let mut lines = text.split('\n');
    let mut next = || lines.next().unwrap_or_default();
    let (poll, delete, id, receipt) = (next(), next(), next(), next());
    azure::fuzz_signed_url(poll, delete, id, receipt);
    let Ok(root) = url::Url::parse("https://tc.example") else { return };
    if let Ok(url) = AddressPolicy::new(&root, &[]).parse_url(poll) {
        assert!(url.scheme() == "https" && url.username().is_empty() && url.password().is_none());
        let address = match url.host() {
            Some(url::Host::Ipv4(address)) => Some(address.into()),
            Some(url::Host::Ipv6(address)) => Some(address.into()),
            Some(url::Host::Domain(_)) | None => None,
        };
        assert!(address.is_none_or(|address| classify(address).range == Range::Public), "{address:?}");
        let host = url.host_str().unwrap_or_default().trim_end_matches('.');
        assert!(host != "localhost" && !host.ends_with(".localhost"), "{host}");
    }
}

#[cfg(test)]
#[path = "../../../../tests/fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::*;

    const TARGETS: [replay::Target; 4] =
        [("poll_answer", poll_response), ("message_text", message_text), ("claim", claim), ("signed_url", signed_url)];

    #[test]
    fn corpus_inputs_and_their_changes_are_accepted_or_rejected() {
        replay::run(&TARGETS);
    }
}
