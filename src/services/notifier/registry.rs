//! The endpoints: those of the configuration, and those that are kept in the store, sealed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use reqwest::header::HeaderName;
use secrecy::ExposeSecret as _;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::content_filter::ContentFilter;
use super::delivery::{SigningKey, parse_headers};
use super::engine::Endpoint;
use super::format::Format;
use super::seal::{SealError, SealKeys};
use super::store::StoredEndpoints;
use journeyman_domain::lane::dispatcher::EndpointLimits;
use journeyman_domain::lane::retry::{OnExhausted, RetryPolicy};
use journeyman_domain::limits::{NOTIFIER_ATTEMPTS_PER_ENDPOINT, WEBHOOK_TIMEOUT_MAX};
use journeyman_platform::settings::values::WebhookUrl;
use journeyman_worker::notify::TypePattern;

/// The endpoints by name, each with the types of events that it wants.
pub type Endpoints = BTreeMap<Arc<str>, (Endpoint, Vec<TypePattern>)>;

pub(super) struct Registry {
    seal_keys: SealKeys,
    current: RwLock<Current>,
}

/// The endpoints, and their generation in the store.
#[derive(Clone)]
pub(super) struct Current {
    pub(super) endpoints: Arc<Registered>,
    pub(super) generation: i64,
}

/// The endpoints of a moment.
pub(super) type Registered = BTreeMap<Arc<str>, Entry>;

#[derive(Clone)]
pub(super) struct Entry {
    pub(super) endpoint: Arc<Endpoint>,
    wants: Arc<[TypePattern]>,
    /// The bytes in the store; an endpoint of the configuration has none.
    sealed: Option<Vec<u8>>,
}

/// An endpoint that is made while the notifier runs. All of it may be secret.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndpointSettings {
    pub url: String,
    #[serde(default)]
    pub events: Vec<String>,
    #[serde(default, skip_serializing_if = "ContentFilter::is_empty")]
    pub filter: ContentFilter,
    /// One `Name: value` in a line.
    #[serde(default)]
    pub headers: String,
    #[serde(default)]
    pub keys: Vec<String>,
    #[serde(default)]
    pub format: Format,
    #[serde(default)]
    pub on_exhausted: OnExhausted,
    #[serde(default = "timeout_seconds")]
    pub timeout_seconds: u64,
    /// The pause between attempts, in place of pauses that grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_seconds: Option<u64>,
}

const fn timeout_seconds() -> u64 {
    20
}

/// Holds nothing of the settings.
#[derive(Debug, thiserror::Error)]
pub enum InvalidEndpoint {
    #[error("endpoint {0} is in the configuration, which has the last word: change it there")]
    Configured(String),
    #[error("an endpoint's name has 1 to 64 letters, digits, `-`, `_` and `.`")]
    Name,
    #[error("{0}")]
    Settings(String),
    #[error(transparent)]
    Seal(#[from] SealError),
}

impl EndpointSettings {
    /// # Errors
    ///
    /// What cannot be used.
    pub fn build(&self) -> Result<(Endpoint, Vec<TypePattern>), InvalidEndpoint> {
        let invalid = |what: &str, error: &dyn std::fmt::Display| InvalidEndpoint::Settings(format!("{what}: {error}"));
        let url: WebhookUrl = self.url.parse().map_err(|error| invalid("url", &format!("expected {error}")))?;
        let headers = parse_headers(&self.headers).map_err(|error| invalid("headers", &error))?;
        let is_pattern = |text: &String| !text.is_empty() && !text.get(..text.len() - 1).unwrap_or("*").contains('*');
        if !self.events.iter().all(is_pattern) {
            return Err(invalid("events", &"a type such as `build.finished`, or the beginning of types and `*`"));
        }
        self.filter.check().map_err(|expected| invalid("filter", &format!("expected {expected}")))?;
        let keys: Result<Vec<SigningKey>, _> = self.keys.iter().map(|key| key.parse()).collect();
        let timeout = Duration::from_secs(self.timeout_seconds);
        if timeout.is_zero() || timeout > WEBHOOK_TIMEOUT_MAX {
            return Err(invalid("timeout_seconds", &format!("expected 1 to {}", WEBHOOK_TIMEOUT_MAX.as_secs())));
        }
        let built_in = RetryPolicy::default();
        let waits = self.retry_seconds.map(|seconds| [Duration::from_secs(seconds.max(1))].into());
        let waits = waits.unwrap_or(built_in.waits);
        let endpoint = Endpoint {
            url: url.parts().clone(),
            headers,
            keys: keys.map_err(|error| invalid("keys", &error))?.into(),
            timeout,
            retry: RetryPolicy { waits, on_exhausted: self.on_exhausted, ..built_in },
            format: self.format,
            filter: self.filter.clone(),
            limits: EndpointLimits { attempts_max: NOTIFIER_ATTEMPTS_PER_ENDPOINT.into(), rate: None },
        };
        Ok((endpoint, self.events.iter().map(|text| TypePattern::new(text)).collect()))
    }
}

impl Entry {
    fn new((endpoint, wants): (Endpoint, Vec<TypePattern>), sealed: Option<Vec<u8>>) -> Self {
        Self { endpoint: Arc::new(endpoint), wants: wants.into(), sealed }
    }

    pub(super) fn wants(&self, event_type: &str, data: &RawValue) -> bool {
        self.wants.iter().any(|pattern| pattern.matches(event_type)) && self.endpoint.filter.matches(data)
    }

    /// What operators may know of it: no path of its URL, no value of a header, no key.
    pub(super) fn shown(&self) -> Value {
        let Endpoint { url, headers, keys, timeout, retry, format, filter, limits } = &*self.endpoint;
        json!({
            "origin": url.origin().ascii_serialization(),
            "configured": self.is_configured(),
            "events": self.wants.iter().map(TypePattern::as_str).collect::<Vec<_>>(),
            "filter": filter,
            "headers": headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(),
            "keys": keys.len(),
            "format": format,
            "on_exhausted": retry.on_exhausted,
            "timeout_seconds": timeout.as_secs_f64(),
            "waits_seconds": retry.waits.iter().map(Duration::as_secs).collect::<Vec<_>>(),
            "attempts_max": limits.attempts_max,
        })
    }

    pub(super) const fn is_configured(&self) -> bool {
        self.sealed.is_none()
    }
}

impl Registry {
    pub(super) fn new(configured: Endpoints, seal_keys: SealKeys) -> Self {
        let entries = configured.into_iter().map(|(name, endpoint)| (name, Entry::new(endpoint, None)));
        let current = Current { endpoints: Arc::new(entries.collect()), generation: 0 };
        Self { seal_keys, current: RwLock::new(current) }
    }

    pub(super) fn current(&self) -> Arc<Registered> {
        Arc::clone(&self.current.read().endpoints)
    }

    /// Seals an endpoint for the store.
    pub(super) fn seal(&self, name: &str, settings: &EndpointSettings) -> Result<Vec<u8>, InvalidEndpoint> {
        self.may_store(name)?;
        settings.build()?;
        let json = serde_json::to_vec(settings).map_err(|error| InvalidEndpoint::Settings(error.to_string()))?;
        Ok(self.seal_keys.seal(name, &json)?)
    }

    /// True if the store may have an endpoint of this name.
    pub(super) fn may_store(&self, name: &str) -> Result<(), InvalidEndpoint> {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if !(1..=64).contains(&name.len()) || !name.bytes().all(is_part) {
            return Err(InvalidEndpoint::Name);
        }
        match self.current().get(name) {
            Some(entry) if entry.is_configured() => Err(InvalidEndpoint::Configured(name.to_owned())),
            Some(_) | None => Ok(()),
        }
    }

    pub(super) fn with_generation(&self) -> Current {
        self.current.read().clone()
    }

    /// Follows the store, unless a later generation was read: an endpoint that was made since would be forgotten.
    pub(super) fn refresh(&self, stored: &StoredEndpoints) {
        let StoredEndpoints { generation, states } = stored;
        if *generation <= self.current.read().generation {
            return;
        }
        let before = self.current();
        let configured = before.iter().filter(|(_, entry)| entry.is_configured());
        let mut entries: Registered = configured.map(|(name, entry)| (Arc::clone(name), entry.clone())).collect();
        for (name, state) in states {
            let Some(sealed) = &state.settings else { continue };
            if entries.contains_key(name.as_str()) {
                continue;
            }
            let entry = match before.get(name.as_str()) {
                Some(entry) if entry.sealed.as_ref() == Some(sealed) => Ok(entry.clone()),
                Some(_) | None => self.open(name, sealed).map(|found| Entry::new(found, Some(sealed.clone()))),
            };
            match entry {
                Ok(entry) => drop(entries.insert(Arc::from(name.as_str()), entry)),
                Err(error) => tracing::error!("endpoint {name} of the store cannot be used: {error}"),
            }
        }
        let mut current = self.current.write();
        if current.generation < *generation {
            *current = Current { endpoints: Arc::new(entries), generation: *generation };
        }
    }

    fn open(&self, name: &str, sealed: &[u8]) -> Result<(Endpoint, Vec<TypePattern>), InvalidEndpoint> {
        let json = self.seal_keys.open(name, sealed)?;
        let settings: EndpointSettings = serde_json::from_slice(json.expose_secret())
            .map_err(|_| InvalidEndpoint::Settings("not written by this version".to_owned()))?;
        settings.build()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notifier::store::EndpointState;

    fn settings(url: &str) -> EndpointSettings {
        serde_json::from_value(serde_json::json!({ "url": url, "events": ["a.*"], "headers": "x-token: 1" })).unwrap()
    }

    fn registry() -> Registry {
        let key = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=".parse().unwrap();
        let configured = settings("https://configured.example").build().unwrap();
        Registry::new([(Arc::from("file"), configured)].into(), SealKeys(vec![key]))
    }

    fn stored(generation: i64, name: &str, sealed: Vec<u8>) -> StoredEndpoints {
        let state = EndpointState { settings: Some(sealed), ..EndpointState::default() };
        StoredEndpoints { generation, states: [(name.to_owned(), state)].into() }
    }

    #[test]
    fn an_endpoint_of_the_store_comes_changes_and_goes() {
        let registry = registry();
        let sealed = registry.seal("api", &settings("https://a.example/secret")).unwrap();
        assert!(!String::from_utf8_lossy(&sealed).contains("secret"));
        registry.refresh(&stored(2, "api", sealed.clone()));
        registry.refresh(&StoredEndpoints { generation: 1, states: BTreeMap::new() });
        let first = registry.current();
        assert_eq!(first["api"].endpoint.url.as_str(), "https://a.example/secret");
        let shown = first["api"].shown();
        assert_eq!((&shown["origin"], &shown["headers"]), (&json!("https://a.example"), &json!(["x-token"])));
        assert!(!shown.to_string().contains("secret"), "{shown}");
        assert!(first["api"].wants("a.b", RawValue::NULL) && !first["api"].wants("b", RawValue::NULL));
        registry.refresh(&stored(3, "api", sealed));
        assert!(Arc::ptr_eq(&registry.current()["api"].endpoint, &first["api"].endpoint), "it is not opened again");
        let other = registry.seal("api", &settings("https://b.example")).unwrap();
        registry.refresh(&stored(4, "api", other.clone()));
        assert_eq!(registry.current()["api"].endpoint.url.as_str(), "https://b.example/");
        registry.refresh(&stored(5, "other-name", other));
        assert_eq!(registry.current().keys().map(|name| &**name).collect::<Vec<_>>(), ["file"], "sealed for its name");
    }

    #[test]
    fn settings_that_cannot_be_used_are_refused_without_their_values() {
        let registry = registry();
        let mut long = settings("https://a.example");
        long.timeout_seconds = 61;
        let mut bad_key = settings("https://a.example");
        bad_key.keys = vec!["whsec_s3cret!".to_owned()];
        let mut bad_type = settings("https://a.example");
        bad_type.events = vec!["build.*.s3cret".to_owned()];
        for (name, settings, words) in [
            ("api", bad_type, "events: a type such as"),
            ("file", settings("https://a.example"), "in the configuration"),
            ("no name", settings("https://a.example"), "an endpoint's name"),
            ("api", settings("ftp://s3cret.example"), "url: expected"),
            ("api", long, "expected 1 to 60"),
            ("api", bad_key, "keys"),
        ] {
            let error = registry.seal(name, &settings).unwrap_err().to_string();
            assert!(error.contains(words) && !error.contains("s3cret"), "{error}");
        }
        let without = Registry::new(Endpoints::new(), SealKeys(Vec::new()));
        let error = without.seal("api", &settings("https://a.example")).unwrap_err().to_string();
        assert!(error.contains("notifier.seal_key_files"), "{error}");
    }
}
