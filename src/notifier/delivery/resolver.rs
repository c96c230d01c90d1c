//! Resolves the host of a webhook to the addresses that the policy allows. The client connects to these addresses and does not
//! resolve the name again.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use super::address::AddressPolicy;
use journeyman_domain::limits::WEBHOOK_DNS_TIMEOUT;

type Found = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send>>;
pub(super) type Lookup = Arc<dyn Fn(String) -> Found + Send + Sync>;

/// The system's resolver.
pub(super) fn system_lookup() -> Lookup {
    Arc::new(|host| Box::pin(async move { Ok(tokio::net::lookup_host((host, 0)).await?.collect()) }))
}

pub(super) struct PolicyResolver {
    pub(super) policy: Arc<AddressPolicy>,
    pub(super) lookup: Lookup,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum ResolveError {
    #[error("the host's address {address} is {kind}; add its network to the allowed ones if webhooks may reach it")]
    Denied { address: IpAddr, kind: &'static str },
    #[error("the host has no address")]
    NoAddress,
    #[error("no answer about the host within {} s", WEBHOOK_DNS_TIMEOUT.as_secs())]
    Timeout,
    #[error("{0}")]
    Failed(io::Error),
}

impl Resolve for PolicyResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let policy = Arc::clone(&self.policy);
        let lookup = (self.lookup)(name.as_str().to_owned());
        Box::pin(async move {
            let found = tokio::time::timeout(WEBHOOK_DNS_TIMEOUT, lookup).await.map_err(|_| ResolveError::Timeout)?;
            let allowed = allowed_only(&policy, found.map_err(ResolveError::Failed)?)?;
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}

fn allowed_only(policy: &AddressPolicy, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, ResolveError> {
    let mut error = ResolveError::NoAddress;
    let mut allowed = Vec::new();
    for socket in found {
        let address = socket.ip();
        match policy.judge(address) {
            Ok(()) => allowed.push(socket),
            Err(kind) => error = ResolveError::Denied { address, kind },
        }
    }
    if allowed.is_empty() { Err(error) } else { Ok(allowed) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

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

    async fn resolve(resolver: &PolicyResolver) -> Result<Vec<String>, ResolveError> {
        match resolver.resolve("hooks.example.com".parse().expect("a name")).await {
            Ok(found) => Ok(found.map(|socket| socket.ip().to_string()).collect()),
            Err(error) => Err(*error.downcast().expect("an error of the resolver")),
        }
    }

    fn resolver(lookup: Lookup) -> PolicyResolver {
        PolicyResolver { policy: Arc::new(AddressPolicy::new(Vec::new())), lookup }
    }

    #[tokio::test]
    async fn p6_a_name_that_is_rebound_to_a_private_address_is_denied() {
        let resolver = resolver(lookup(&[&["1.1.1.1"], &["10.0.0.1", "169.254.169.254"]]));

        assert_eq!(resolve(&resolver).await.expect("public"), ["1.1.1.1"]);

        let error = resolve(&resolver).await.expect_err("rebound");
        assert!(matches!(error, ResolveError::Denied { kind: "link-local", .. }), "{error}");
    }

    #[tokio::test]
    async fn p6_only_the_allowed_addresses_of_a_name_are_used() {
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
        assert!(matches!(error, ResolveError::Timeout), "{error}");
    }
}
