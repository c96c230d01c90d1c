//! Resolves a host to the addresses that a policy permits.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

type Found = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;
pub type Lookup = Arc<dyn Fn(String) -> Found + Send + Sync>;

/// The system's resolver.
pub fn system_lookup() -> Lookup {
    Arc::new(|host| Box::pin(async move { Ok(tokio::net::lookup_host((host, 0)).await?.collect()) }))
}

/// Says why an address of a host is not connected to.
pub type Judge = Arc<dyn Fn(&str, IpAddr) -> Result<(), String> + Send + Sync>;

pub struct FilteringResolver {
    pub judge: Judge,
    pub lookup: Lookup,
    pub timeout: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    #[error("{0}")]
    Denied(String),
    #[error("the host has no address")]
    NoAddress,
    #[error("no answer about the host within {} s", .0.as_secs())]
    Timeout(Duration),
    #[error("{0}")]
    Failed(io::Error),
}

impl Resolve for FilteringResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (judge, timeout) = (Arc::clone(&self.judge), self.timeout);
        let lookup = (self.lookup)(name.as_str().to_owned());
        Box::pin(async move {
            let found = tokio::time::timeout(timeout, lookup).await.map_err(|_| ResolveError::Timeout(timeout))?;
            let permitted = permitted_only(&judge, name.as_str(), found.map_err(ResolveError::Failed)?)?;
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

fn permitted_only(judge: &Judge, host: &str, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, ResolveError> {
    let mut error = ResolveError::NoAddress;
    let mut permitted = Vec::new();
    for address in found {
        match judge(host, address.ip()) {
            Ok(()) => permitted.push(address),
            Err(why) => error = ResolveError::Denied(why),
        }
    }
    if permitted.is_empty() { Err(error) } else { Ok(permitted) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::http::address::{Range, classify};

    /// The last answer is repeated.
    fn lookup(answers: &'static [&'static [&'static str]]) -> Lookup {
        let asked = AtomicUsize::new(0);
        Arc::new(move |_| {
            let answer = answers[asked.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1)];
            Box::pin(
                async move { Ok(answer.iter().map(|ip| SocketAddr::new(ip.parse().expect("an IP"), 0)).collect()) },
            )
        })
    }

    async fn resolve(resolver: &FilteringResolver) -> Result<Vec<String>, ResolveError> {
        match resolver.resolve("hooks.example.com".parse().expect("a name")).await {
            Ok(found) => Ok(found.map(|socket| socket.ip().to_string()).collect()),
            Err(error) => Err(*error.downcast().expect("an error of the resolver")),
        }
    }

    fn resolver(lookup: Lookup) -> FilteringResolver {
        let judge: Judge = Arc::new(|host, address| {
            let class = classify(address);
            if class.range == Range::Public { Ok(()) } else { Err(format!("{host} is {}", class.kind)) }
        });
        FilteringResolver { judge, lookup, timeout: Duration::from_secs(4) }
    }

    #[tokio::test]
    async fn p6_a_name_that_is_rebound_to_a_private_address_is_denied() {
        let resolver = resolver(lookup(&[&["1.1.1.1"], &["10.0.0.1", "169.254.169.254"]]));

        assert_eq!(resolve(&resolver).await.expect("public"), ["1.1.1.1"]);

        let error = resolve(&resolver).await.expect_err("rebound");
        assert!(matches!(error, ResolveError::Denied(_)), "{error}");
        assert_eq!(error.to_string(), "hooks.example.com is link-local");
    }

    #[tokio::test]
    async fn p6_only_the_permitted_addresses_of_a_name_are_used() {
        let resolver = resolver(lookup(&[&["127.0.0.1", "1.1.1.1", "fe80::1", "2606:4700::1111"]]));

        assert_eq!(resolve(&resolver).await.expect("some are public"), ["1.1.1.1", "2606:4700::1111"]);
    }

    #[tokio::test]
    async fn a_name_without_addresses_is_an_error() {
        let error = resolve(&resolver(lookup(&[&[]]))).await.expect_err("empty");
        assert!(matches!(error, ResolveError::NoAddress), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_server_that_does_not_answer_is_given_up() {
        let resolver = resolver(Arc::new(|_| Box::pin(std::future::pending())));
        let error = resolve(&resolver).await.expect_err("no answer");
        assert!(matches!(error, ResolveError::Timeout(_)), "{error}");
    }
}
