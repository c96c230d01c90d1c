//! Decides which signed URLs, upload URLs and redirects of a service the worker may follow.
//!
//! A compromised queue must not make its workers reach what only they can: a cloud's metadata service, this host's
//! ports, the private network. So a host is checked as written, and its addresses again when it is resolved; the
//! connection uses the checked addresses. Hosts of `root_url` and `allow_hosts` may be private;
//! metadata and link-local addresses are always forbidden.
//!
//! Calls to the configured URLs of the service itself are not checked here.

use std::net::IpAddr;

use url::{Host, Url};

use super::error_response::sanitize;
use journeyman_platform::http::address::{Class, HostPolicy, Range, normalize_host};

#[derive(Debug)]
pub(super) struct AddressPolicy {
    /// Including the host of `root_url`.
    hosts: HostPolicy,
    requires_tls: bool,
}

/// Shows nothing of the URL but its host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ForbiddenUrl {
    #[error("is not a URL: {0}")]
    NoUrl(url::ParseError),
    #[error("is neither http nor https")]
    Scheme,
    #[error("is not https, but root_url is")]
    NoTls,
    #[error("contains a user or a password")]
    Credentials,
    #[error(
        "leads to {0}, a private address, which is not allowed; to allow it, set allow_hosts = [\"{0}\"] for this source"
    )]
    Private(String),
    #[error("leads to {0}, which is not allowed: a metadata service, a link-local or an unusable address")]
    Forbidden(String),
}

impl AddressPolicy {
    /// An entry of `allow_hosts` is a host, `.example.com` for every subdomain, or `*` for every host.
    pub(super) fn new(root: &Url, allow_hosts: &[String]) -> Self {
        let hosts = root.host_str().into_iter().chain(allow_hosts.iter().map(String::as_str));
        Self { hosts: HostPolicy::new(hosts, Vec::new()), requires_tls: root.scheme() == "https" }
    }

    /// Parses a URL and checks it without resolving its host.
    pub(super) fn parse_url(&self, text: &str) -> Result<Url, ForbiddenUrl> {
        let url = Url::parse(text).map_err(ForbiddenUrl::NoUrl)?;
        self.check_url(&url)?;
        Ok(url)
    }

    pub(super) fn check_url(&self, url: &Url) -> Result<(), ForbiddenUrl> {
        match url.scheme() {
            "https" => {}
            "http" if self.requires_tls => return Err(ForbiddenUrl::NoTls),
            "http" => {}
            _ => return Err(ForbiddenUrl::Scheme),
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(ForbiddenUrl::Credentials);
        }
        let host = url.host_str().unwrap_or_default();
        match url.host() {
            Some(Host::Ipv4(address)) => self.check_address(host, address.into()),
            Some(Host::Ipv6(address)) => self.check_address(host, address.into()),
            Some(Host::Domain(name)) => self.hosts.judge_name(name).map_err(|class| forbidden(host, class)),
            None => Err(ForbiddenUrl::NoUrl(url::ParseError::EmptyHost)),
        }
    }

    pub(super) fn check_address(&self, host: &str, address: IpAddr) -> Result<(), ForbiddenUrl> {
        self.hosts.judge(host, address).map_err(|class| forbidden(host, class))
    }

    pub(super) fn is_trusted(&self, host: &str) -> bool {
        self.hosts.trusts(host)
    }
}

fn forbidden(host: &str, class: Class) -> ForbiddenUrl {
    let shown = sanitize(&normalize_host(host));
    match class.range {
        Range::Private => ForbiddenUrl::Private(shown),
        Range::Public | Range::Unusable | Range::Metadata => ForbiddenUrl::Forbidden(shown),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(root: &str, allow_hosts: &[&str]) -> AddressPolicy {
        let root = Url::parse(root).unwrap();
        AddressPolicy::new(&root, &allow_hosts.iter().map(|host| (*host).to_owned()).collect::<Vec<_>>())
    }

    /// What is decided without a look-up, where the root is public and nothing else is allowed.
    const URLS: [(&str, &str); 95] = [
        ("https://tc.example/x", "ok"),
        ("https://acc.queue.core.windows.net/q/messages?sig=x", "ok"),
        ("https://bucket.s3.amazonaws.com/k?X-Amz-Signature=x", "ok"),
        ("https://storage.googleapis.com/b/k", "ok"),
        ("https://8.8.8.8/", "ok"),
        ("https://[2600:1f18::1]/", "ok"),
        ("https://xn--bcher-kva.example/", "ok"),
        ("https://bücher.example/", "ok"),
        // Other ways to somewhere.
        ("http://tc.example/x", "NoTls"),
        ("ftp://tc.example/x", "Scheme"),
        ("file:///etc/passwd", "Scheme"),
        ("gopher://tc.example/", "Scheme"),
        ("unix:/run/docker.sock", "Scheme"),
        ("javascript:alert(1)", "Scheme"),
        ("//169.254.169.254/", "NoUrl"),
        ("/etc/passwd", "NoUrl"),
        ("", "NoUrl"),
        ("https://", "NoUrl"),
        ("https://user@tc.example/", "Credentials"),
        ("https://user:pass@tc.example/", "Credentials"),
        ("https://tc.example@169.254.169.254/", "Credentials"),
        ("https://tc.example:443@127.0.0.1/", "Credentials"),
        ("https://169.254.169.254#@tc.example/", "Forbidden"),
        ("https://127.0.0.1?@tc.example/", "Private"),
        ("https://127.0.0.1\\@tc.example/", "Private"),
        // Metadata.
        ("https://169.254.169.254/latest/meta-data/", "Forbidden"),
        ("https://169.254.169.254./", "Forbidden"),
        ("https://169.254.170.2/v2/credentials", "Forbidden"),
        ("https://2852039166/", "Forbidden"),
        ("https://0xa9fea9fe/", "Forbidden"),
        ("https://0xA9.0xFE.0xA9.0xFE/", "Forbidden"),
        ("https://0251.0376.0251.0376/", "Forbidden"),
        ("https://025177524776/", "Forbidden"),
        ("https://169.254.43518/", "Forbidden"),
        ("https://169.16689662/", "Forbidden"),
        ("https://169.0xfe.0251.254/", "Forbidden"),
        ("https://[::ffff:169.254.169.254]/", "Forbidden"),
        ("https://[::ffff:a9fe:a9fe]/", "Forbidden"),
        ("https://[0:0:0:0:0:ffff:a9fe:a9fe]/", "Forbidden"),
        ("https://[::a9fe:a9fe]/", "Forbidden"),
        ("https://[2002:a9fe:a9fe::1]/", "Forbidden"),
        ("https://[64:ff9b::169.254.169.254]/", "Forbidden"),
        ("https://[fd00:ec2::254]/latest", "Forbidden"),
        ("https://[fd00:0ec2:0:0:0:0:0:254]/", "Forbidden"),
        ("https://[fd20:ce::254]/", "Forbidden"),
        ("https://metadata.google.internal/", "Forbidden"),
        ("https://METADATA.google.internal./", "Forbidden"),
        ("https://metadata/", "Forbidden"),
        ("https://metadata.goog/", "Forbidden"),
        ("https://instance-data/", "Forbidden"),
        ("https://168.63.129.16/", "Forbidden"),
        ("https://100.100.100.200/", "Forbidden"),
        ("https://192.0.0.192/", "Forbidden"),
        ("https://１６９.２５４.１６９.２５４/", "Forbidden"),
        ("https://169。254。169。254/", "Forbidden"),
        ("https://①⑥⑨.254.169.254/", "Forbidden"),
        ("https://%31%36%39.254.169.254/", "Forbidden"),
        ("https://ｍｅｔａｄａｔａ.google.internal/", "Forbidden"),
        // Link-local.
        ("https://169.254.1.1/", "Forbidden"),
        ("https://[fe80::1]/", "Forbidden"),
        ("https://[febf::1]/", "Forbidden"),
        ("https://[fe80::1%25eth0]/", "NoUrl"),
        ("https://[fe80::1%eth0]/", "NoUrl"),
        ("https://[::ffff:169.254.1.1]/", "Forbidden"),
        // This host.
        ("https://127.0.0.1/", "Private"),
        ("https://127.1/", "Private"),
        ("https://127.255.255.254/", "Private"),
        ("https://0x7f.1/", "Private"),
        ("https://0177.0.0.1/", "Private"),
        ("https://2130706433/", "Private"),
        ("https://[::1]/", "Private"),
        ("https://[::ffff:127.0.0.1]/", "Private"),
        ("https://[64:ff9b::7f00:1]/", "Private"),
        ("https://[2002:7f00:1::]/", "Private"),
        ("https://localhost/", "Private"),
        ("https://LOCALHOST./", "Private"),
        ("https://a.localhost/", "Private"),
        ("https://ⓛocalhost/", "Private"),
        ("https://0.0.0.0/", "Forbidden"),
        ("https://0/", "Forbidden"),
        ("https://[::]/", "Forbidden"),
        // Private networks.
        ("https://10.0.0.1/", "Private"),
        ("https://172.16.0.1/", "Private"),
        ("https://172.31.255.255/", "Private"),
        ("https://192.168.1.1/", "Private"),
        ("https://100.64.0.1/", "Private"),
        ("https://198.18.0.1/", "Private"),
        ("https://[fc00::1]/", "Private"),
        ("https://[fec0::1]/", "Private"),
        ("https://[64:ff9b:1::a00:1]/", "Private"),
        ("https://[::ffff:10.0.0.1]/", "Private"),
        // No host.
        ("https://224.0.0.1/", "Forbidden"),
        ("https://255.255.255.255/", "Forbidden"),
        ("https://[ff02::1]/", "Forbidden"),
        ("https://[2001:db8::1]/", "Forbidden"),
    ];

    fn decided(policy: &AddressPolicy, url: &str) -> String {
        match policy.parse_url(url) {
            Ok(_) => "ok".to_owned(),
            Err(ForbiddenUrl::Private(_)) => "Private".to_owned(),
            Err(ForbiddenUrl::Forbidden(_)) => "Forbidden".to_owned(),
            Err(ForbiddenUrl::NoUrl(_)) => "NoUrl".to_owned(),
            Err(other) => format!("{other:?}"),
        }
    }

    #[test]
    fn no_spelling_of_a_forbidden_address_passes() {
        let policy = policy("https://tc.example", &[]);
        for (url, expected) in URLS {
            assert_eq!(decided(&policy, url), expected, "{url}");
        }
    }

    #[test]
    fn every_host_may_be_allowed_and_metadata_and_link_local_ones_stay_refused() {
        let policy = policy("https://tc.example", &["*"]);
        for (url, expected) in URLS {
            let expected = if expected == "Private" { "ok" } else { expected };
            assert_eq!(decided(&policy, url), expected, "{url}");
        }
    }

    #[test]
    fn own_hosts_and_allowed_ones_may_be_private_and_nobody_else_may() {
        let policy = policy("http://127.0.0.1:7070", &["minio", ".store.internal", "10.1.2.3", "[fd12::1]"]);
        let private = IpAddr::from([192, 168, 0, 9]);
        for url in [
            "http://127.0.0.1:9000/",
            "http://127.1:7070/put",
            "http://10.1.2.3/",
            "https://10.1.2.3:9000/",
            "http://[fd12::1]:9000/",
        ] {
            assert_eq!(decided(&policy, url), "ok", "{url}");
        }
        for url in ["http://127.0.0.2/", "http://localhost:7070/", "http://10.1.2.4/", "http://[::1]/"] {
            assert_ne!(decided(&policy, url), "ok", "{url}");
        }
        for host in ["minio", "MinIO.", "a.store.internal", "127.0.0.1"] {
            assert_eq!(policy.check_address(host, private), Ok(()), "{host}");
            assert!(policy.check_address(host, [169, 254, 169, 254].into()).is_err(), "{host}");
        }
        for host in ["store.internal", "xstore.internal", "minio.evil.example", "tc.example"] {
            assert!(policy.check_address(host, private).is_err(), "{host}");
        }
    }

    #[test]
    fn a_refusal_names_the_key_to_set_where_one_would_help() {
        let policy = policy("https://tc.example", &[]);
        let said = |url: &str| policy.parse_url(url).unwrap_err().to_string();
        let private = said("https://10.9.8.7:9000/bucket?sig=secret");
        assert!(private.contains("allow_hosts = [\"10.9.8.7\"]") && !private.contains("secret"), "{private}");
        let metadata = said("https://169.254.169.254/");
        assert!(!metadata.contains("allow_hosts"), "{metadata}");
    }
}
