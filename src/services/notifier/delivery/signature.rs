//! Signs webhooks as Standard Webhooks 1.0.0 says: `v1` is HMAC-SHA256, `v1a` is ed25519.

use std::str::FromStr;
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use ed25519_dalek::Signer as _;
use hmac::{Hmac, KeyInit as _, Mac as _};
use reqwest::header::{HeaderMap, HeaderValue, InvalidHeaderValue};
use secrecy::{ExposeSecret as _, SecretSlice};
use sha2::Sha256;

/// How old or new a signature may be.
const TOLERANCE: Duration = Duration::from_secs(5 * 60);

/// Keys are pasted with and without padding.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// A key of an endpoint. Parses from `whsec_` with the base64 of 24 to 64 bytes, or `whsk_` with that of an ed25519 secret key, with
/// or without its public half.
pub enum SigningKey {
    Symmetric(Hmac<Sha256>),
    Asymmetric(Box<ed25519_dalek::SigningKey>),
}

impl FromStr for SigningKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let not_base64 = |_| "the signing key is not base64 after its prefix".to_owned();
        let decode = |base64: &str| BASE64.decode(base64).map(SecretSlice::from).map_err(not_base64);
        if let Some(base64) = text.strip_prefix("whsec_") {
            let key = decode(base64)?;
            let key = key.expose_secret();
            match Hmac::<Sha256>::new_from_slice(key) {
                Ok(mac) if (24..=64).contains(&key.len()) => Ok(Self::Symmetric(mac)),
                Ok(_) | Err(_) => Err(format!("a `whsec_` key has 24 to 64 bytes; this one has {}", key.len())),
            }
        } else if let Some(base64) = text.strip_prefix("whsk_") {
            let key = decode(base64)?;
            let key = key.expose_secret();
            let pair = match <&[u8; 64]>::try_from(key) {
                Ok(pair) => ed25519_dalek::SigningKey::from_keypair_bytes(pair),
                Err(_) => ed25519_dalek::SigningKey::try_from(key),
            };
            let invalid =
                "a `whsk_` key is an ed25519 secret key of 32 bytes, or 64 with the public key that belongs to it";
            Ok(Self::Asymmetric(Box::new(pair.map_err(|_| invalid)?)))
        } else {
            Err("a signing key begins with `whsec_` (HMAC-SHA256) or `whsk_` (ed25519)".to_owned())
        }
    }
}

impl SigningKey {
    fn sign(&self, content: &[u8]) -> String {
        match self {
            Self::Symmetric(mac) => {
                format!("v1,{}", BASE64.encode(mac.clone().chain_update(content).finalize().into_bytes()))
            }
            Self::Asymmetric(key) => format!("v1a,{}", BASE64.encode(key.sign(content).to_bytes())),
        }
    }
}

/// The value of `webhook-signature` for an attempt at `at` (since 1970): one signature of each key, so that receivers know one of
/// them while keys are replaced.
pub(super) fn sign(
    keys: &[SigningKey],
    id: &HeaderValue,
    at: Duration,
    body: &[u8],
) -> Result<HeaderValue, InvalidHeaderValue> {
    let content = [id.as_bytes(), b".", at.as_secs().to_string().as_bytes(), b".", body].concat();
    let signatures: Vec<_> = keys.iter().map(|key| key.sign(&content)).collect();
    HeaderValue::try_from(signatures.join(" "))
}

/// What a receiver finds out about a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    /// One of its keys has signed, in this version.
    By(&'static str),
    Wrongly,
    TooOld,
    Not,
}

/// Compares the signatures with what the keys sign: both algorithms sign the same content the same way each time.
pub fn verify(keys: &[SigningKey], headers: &HeaderMap, body: &[u8], now: i64) -> Signed {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(id), Some(at)) = (text("webhook-id"), text("webhook-timestamp")) else { return Signed::Not };
    let Some(signatures) = text("webhook-signature") else { return Signed::Not };
    let content = [id.as_bytes(), b".", at.as_bytes(), b".", body].concat();
    let own = keys.iter().map(|key| key.sign(&content)).find(|own| signatures.split(' ').any(|one| one == own));
    match (own, at.parse::<i64>()) {
        (Some(_), Ok(at)) if at.abs_diff(now) > TOLERANCE.as_secs() => Signed::TooOld,
        (Some(own), Ok(_)) => Signed::By(if own.starts_with("v1a,") { "v1a" } else { "v1" }),
        (None, _) | (_, Err(_)) => Signed::Wrongly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize)]
    struct Fixture {
        vectors: Vec<Vector>,
    }

    #[derive(serde::Deserialize)]
    struct Vector {
        id: String,
        timestamp: u64,
        body: String,
        key: String,
        signature: String,
    }

    fn vectors() -> Vec<Vector> {
        let text = include_str!("../../../../fixtures/notifier/signatures.json");
        serde_json::from_str::<Fixture>(text).expect("the fixture is valid").vectors
    }

    fn signed(keys: &[SigningKey], vector: &Vector) -> String {
        let id = vector.id.parse().expect("an id");
        let header = sign(keys, &id, Duration::from_secs(vector.timestamp), vector.body.as_bytes());
        header.expect("base64 is valid in a header").to_str().expect("ASCII").to_owned()
    }

    #[test]
    fn p8_signatures_are_those_of_the_official_library() {
        for vector in vectors() {
            assert_eq!(signed(&[vector.key.parse().expect("a key")], &vector), vector.signature, "{}", vector.key);
        }
    }

    #[test]
    fn all_keys_sign_while_they_are_replaced() {
        let vectors: Vec<_> = vectors().into_iter().filter(|vector| vector.timestamp == 1_674_087_231).collect();
        let keys: Vec<_> = vectors.iter().map(|vector| vector.key.parse().expect("a key")).collect();
        let expected: Vec<_> = vectors.iter().map(|vector| vector.signature.clone()).collect();
        assert_eq!(signed(&keys, &vectors[0]), expected.join(" "));
    }

    #[test]
    fn a_signature_is_verified_with_one_of_the_keys_and_its_time() {
        for vector in vectors() {
            let key = || vector.key.parse::<SigningKey>().expect("a key");
            let other = || "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz".parse::<SigningKey>().expect("a key");
            let at = vector.timestamp.cast_signed();
            let version = if vector.key.starts_with("whsk_") { "v1a" } else { "v1" };
            let mut headers = HeaderMap::new();
            let signatures = format!("v1,AAAA {} v2,x", vector.signature);
            for (name, text) in
                [("webhook-id", &vector.id), ("webhook-timestamp", &at.to_string()), ("webhook-signature", &signatures)]
            {
                headers.insert(name, text.parse().expect("a value"));
            }
            let body = vector.body.as_bytes();
            assert_eq!(verify(&[other(), key()], &headers, body, at + 300), Signed::By(version));
            assert_eq!(verify(&[key()], &headers, body, at + 301), Signed::TooOld);
            assert_eq!(verify(&[key()], &headers, b"other", at), Signed::Wrongly);
            assert_eq!(verify(&[other()], &headers, body, at), Signed::Wrongly);
            headers.remove("webhook-signature");
            assert_eq!(verify(&[key()], &headers, body, at), Signed::Not);
        }
    }

    #[test]
    fn keys_that_cannot_be_used_are_refused_and_never_shown() {
        for (text, expected) in [
            ("", "begins with"),
            ("secret-c2VjcmV0", "begins with"),
            ("whpk_c2VjcmV0", "begins with"),
            ("whsec_sec!ret", "not base64"),
            ("whsec_c2VjcmV0", "this one has 6"),
            ("whsk_c2VjcmV0", "ed25519 secret key"),
            (
                "whsk_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAABAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQ==",
                "ed25519 secret key",
            ),
        ] {
            let error = text.parse::<SigningKey>().err().expect("it is invalid");
            assert!(error.contains(expected), "{text}: {error}");
            assert!(!error.contains("c2VjcmV0"), "{error}");
        }
    }
}
