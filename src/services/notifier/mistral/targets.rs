//! The endpoints that messages name, by URL and headers. Both are secrets: the store has them sealed, under a name that is a hash.

use std::collections::BTreeMap;
use std::sync::Arc;

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::notifier::content_filter::ContentFilter;
use crate::notifier::format::Format;
use crate::notifier::intake::{EndpointError, Intake};
use crate::notifier::registry::{EndpointSettings, InvalidEndpoint};
use journeyman_domain::lane::retry::OnExhausted;
use journeyman_domain::limits::{NOTIFIER_TARGET_TIMEOUT, NOTIFIER_TARGETS_MAX};

/// The beginning of the names of such endpoints.
pub(super) const PREFIX: &str = "mistral-";

/// True for an endpoint that a message has named.
pub(crate) fn is_target(endpoint: &str) -> bool {
    endpoint.starts_with(PREFIX)
}

/// What the names of such endpoints are like, for the store.
pub(crate) fn name_pattern() -> String {
    format!("{PREFIX}{}", "_".repeat(2 * KEY_BYTES))
}

/// The bytes that are kept of the HMAC, so that the queue of any URL has a short name.
pub(super) const KEY_BYTES: usize = 16;

/// The secret that publishers and the notifier share.
#[derive(Clone)]
pub struct UrlKey(Hmac<Sha256>);

impl UrlKey {
    /// # Errors
    ///
    /// Fails if it is empty.
    pub fn new(secret: &str) -> Result<Self, &'static str> {
        match Hmac::new_from_slice(secret.as_bytes()) {
            Ok(mac) if !secret.is_empty() => Ok(Self(mac)),
            Ok(_) | Err(_) => Err("the key is empty"),
        }
    }

    pub(super) fn of(&self, parts: &[&str]) -> String {
        let digest = self.0.clone().chain_update(parts.join("\0")).finalize().into_bytes();
        hex::encode(digest.get(..KEY_BYTES).unwrap_or_default())
    }
}

/// The address to which a publisher wants an event to be delivered.
#[derive(PartialEq, Eq)]
pub(super) struct Target {
    url: String,
    /// One in a line.
    headers: String,
    retry_seconds: Option<u64>,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Target([REDACTED])")
    }
}

pub(super) enum TargetError {
    /// The message is at fault.
    Invalid(String),
    Failed(String),
}

impl Target {
    /// # Errors
    ///
    /// Fails if a header would become two.
    pub(super) fn new(
        url: String,
        headers: &BTreeMap<String, String>,
        retry_seconds: Option<u64>,
    ) -> Result<Self, &'static str> {
        let line = |(name, value): (&String, &String)| format!("{name}: {value}\n");
        if headers
            .iter()
            .any(|(name, value)| name.contains(':') || [name, value].iter().any(|text| text.contains(char::is_control)))
        {
            return Err("one of its headers is none of HTTP");
        }
        Ok(Self { url, headers: headers.iter().map(line).collect(), retry_seconds })
    }

    /// The name of its endpoint, which is made before its first event.
    pub(super) async fn endpoint(self, key: &UrlKey, intake: &Intake) -> Result<Arc<str>, TargetError> {
        let retry = self.retry_seconds.map(|seconds| seconds.to_string());
        let parts = [Some(self.url.as_str()), Some(&self.headers), retry.as_deref()];
        let name = format!("{PREFIX}{}", key.of(&parts.into_iter().flatten().collect::<Vec<_>>()));
        let known = intake.endpoints();
        if let Some((name, _)) = known.get_key_value(name.as_str()) {
            return Ok(Arc::clone(name));
        }
        if known.keys().filter(|name| is_target(name)).count() >= NOTIFIER_TARGETS_MAX {
            let message = format!(
                "{NOTIFIER_TARGETS_MAX} URLs with headers are known, and this one is not among them: remove endpoints that are not used"
            );
            return Err(TargetError::Invalid(message));
        }
        let settings = EndpointSettings {
            url: self.url,
            events: Vec::new(),
            headers: self.headers,
            keys: Vec::new(),
            filter: ContentFilter::default(),
            format: Format::Mistral,
            on_exhausted: OnExhausted::Block,
            timeout_seconds: NOTIFIER_TARGET_TIMEOUT.as_secs(),
            retry_seconds: self.retry_seconds,
        };
        match intake.put_endpoint(&name, &settings).await {
            Ok(()) => Ok(name.into()),
            Err(EndpointError::Invalid(InvalidEndpoint::Settings(why))) => Err(TargetError::Invalid(why)),
            Err(error) => Err(TargetError::Failed(error.to_string())),
        }
    }
}

#[cfg(test)]
mod tests {
    use journeyman_platform::sqlite::Db;

    use super::*;
    use crate::notifier::registry::Registry;
    use crate::notifier::seal::SealKeys;
    use crate::notifier::store::Store;

    #[tokio::test]
    async fn f2_a_full_table_refuses_the_message_of_a_new_target_alone() {
        let key = UrlKey::new("secret").unwrap();
        let target = |url: &str| Target::new(url.to_owned(), &BTreeMap::new(), None).unwrap();
        let known = format!("{PREFIX}{}", key.of(&["https://known.example", ""]));
        let settings: EndpointSettings = serde_json::from_str(r#"{ "url": "https://a.example" }"#).unwrap();
        let names = (1..NOTIFIER_TARGETS_MAX).map(|number| format!("{PREFIX}{number}")).chain([known.clone()]);
        let endpoints = names.map(|name| (name.into(), settings.build().unwrap())).collect();
        let (store, _status) = Store::open(&Db::Memory).unwrap();
        let intake = Intake::new(store, Arc::new(Registry::new(endpoints, SealKeys(Vec::new()))));
        let new = target("https://new.example").endpoint(&key, &intake).await;
        assert!(matches!(new, Err(TargetError::Invalid(why)) if why.contains("10000 URLs")));
        let found = target("https://known.example").endpoint(&key, &intake).await;
        assert!(found.is_ok_and(|name| *name == *known));
    }
}
