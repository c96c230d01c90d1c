//! Judges hosts and addresses that others choose: a queue by its signed URLs, a subscriber by its webhook.
//!
//! They must not lead to what only this host can reach: its own ports, its private network, a cloud's metadata service.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Range {
    Public,
    /// Private networks and this host.
    Private,
    /// Multicast, documentation, reserved, or an obsolete tunnel.
    Unusable,
    /// A cloud's metadata service. Never connected to, whatever is configured.
    Metadata,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Class {
    pub range: Range,
    /// What kind of address it is, to follow "is".
    pub kind: &'static str,
}

/// The special-purpose addresses that IANA registers, and metadata services. The first match counts.
const V4: [(Ipv4Net, Class); 19] = [
    v4([100, 100, 100, 200], 32, Range::Metadata, "a metadata service"),
    v4([168, 63, 129, 16], 32, Range::Metadata, "the host service of Azure"),
    v4([169, 254, 0, 0], 16, Range::Metadata, "link-local"),
    v4([192, 0, 0, 192], 32, Range::Metadata, "a metadata service"),
    v4([0, 0, 0, 0], 8, Range::Unusable, "unspecified"),
    v4([10, 0, 0, 0], 8, Range::Private, "private"),
    v4([100, 64, 0, 0], 10, Range::Private, "shared by a carrier's NAT"),
    v4([127, 0, 0, 0], 8, Range::Private, "loopback"),
    v4([172, 16, 0, 0], 12, Range::Private, "private"),
    v4([192, 0, 0, 0], 24, Range::Unusable, "reserved"),
    v4([192, 0, 2, 0], 24, Range::Unusable, "for documentation"),
    v4([192, 88, 99, 0], 24, Range::Unusable, "a 6to4 relay"),
    v4([192, 168, 0, 0], 16, Range::Private, "private"),
    v4([198, 18, 0, 0], 15, Range::Private, "for benchmarks"),
    v4([198, 51, 100, 0], 24, Range::Unusable, "for documentation"),
    v4([203, 0, 113, 0], 24, Range::Unusable, "for documentation"),
    v4([224, 0, 0, 0], 4, Range::Unusable, "multicast"),
    v4([255, 255, 255, 255], 32, Range::Unusable, "broadcast"),
    v4([240, 0, 0, 0], 4, Range::Unusable, "reserved"),
];

/// What is not listed is unusable: only `2000::/3` is assigned.
const V6: [(Ipv6Net, Class); 12] = [
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32, Range::Metadata, "a metadata service"),
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0], 32, Range::Metadata, "a metadata service"),
    v6([0, 0, 0, 0, 0, 0, 0, 0], 128, Range::Unusable, "unspecified"),
    v6([0, 0, 0, 0, 0, 0, 0, 1], 128, Range::Private, "loopback"),
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48, Range::Private, "local NAT64"),
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23, Range::Unusable, "reserved"),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32, Range::Unusable, "for documentation"),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20, Range::Unusable, "for documentation"),
    v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3, Range::Public, "public"),
    v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7, Range::Private, "private"),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10, Range::Unusable, "link-local"),
    v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10, Range::Private, "site-local"),
];

const fn v4([a, b, c, d]: [u8; 4], prefix: u8, range: Range, kind: &'static str) -> (Ipv4Net, Class) {
    (Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix), Class { range, kind })
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix: u8, range: Range, kind: &'static str) -> (Ipv6Net, Class) {
    (Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix), Class { range, kind })
}

/// The address that a connection leads to: of an IPv6 address that carries an IPv4 address, the latter.
pub fn destination(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    match v6.segments() {
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => address,
        // IPv4-mapped; IPv4-compatible; NAT64; 6to4.
        [0, 0, 0, 0, 0, 0 | 0xffff, a, b] | [0x64, 0xff9b, 0, 0, 0, 0, a, b] | [0x2002, a, b, ..] => {
            let ([a, b], [c, d]) = (a.to_be_bytes(), b.to_be_bytes());
            Ipv4Addr::new(a, b, c, d).into()
        }
        _ => address,
    }
}

/// What may be connected to beside public addresses. Metadata services never are.
#[derive(Debug, Clone, Default)]
pub struct HostPolicy {
    hosts: Vec<String>,
    networks: Vec<IpNet>,
}

impl HostPolicy {
    /// A host is a name or an address, `.example.com` for every subdomain, or `*` for every host.
    pub fn new<'a>(hosts: impl IntoIterator<Item = &'a str>, networks: Vec<IpNet>) -> Self {
        Self { hosts: hosts.into_iter().map(normalize_host).collect(), networks }
    }

    /// # Errors
    ///
    /// What kind of address it is, if it is denied.
    pub fn judge(&self, host: &str, address: IpAddr) -> Result<(), Class> {
        let class = classify(address);
        let is_listed = || self.networks.iter().any(|network| network.contains(&destination(address)));
        match class.range {
            Range::Public => Ok(()),
            Range::Private if self.trusts(host) || is_listed() => Ok(()),
            Range::Unusable if is_listed() => Ok(()),
            Range::Private | Range::Unusable | Range::Metadata => Err(class),
        }
    }

    /// Judges a name by itself. Its addresses are judged once they are known.
    ///
    /// # Errors
    ///
    /// What kind of address it has, if it is denied.
    pub fn judge_name(&self, name: &str) -> Result<(), Class> {
        let host = normalize_host(name);
        if METADATA_NAMES.contains(&host.as_str()) {
            return Err(Class { range: Range::Metadata, kind: "a metadata service" });
        }
        let is_private = host == "localhost" || host.ends_with(".localhost");
        let class = Class { range: Range::Private, kind: "loopback" };
        if is_private && !self.trusts(&host) { Err(class) } else { Ok(()) }
    }

    pub fn trusts(&self, host: &str) -> bool {
        let host = normalize_host(host);
        self.hosts.iter().any(|pattern| pattern == "*" || host_matches(&host, pattern))
    }
}

const METADATA_NAMES: [&str; 5] =
    ["metadata", "metadata.google.internal", "metadata.goog", "instance-data", "instance-data.ec2.internal"];

/// A pattern with a leading dot matches every subdomain.
pub fn host_matches(host: &str, pattern: &str) -> bool {
    if pattern.starts_with('.') { host.ends_with(pattern) } else { host == pattern }
}

/// Lower case, without brackets and trailing dots.
pub fn normalize_host(host: &str) -> String {
    host.trim_end_matches('.').trim_matches(['[', ']']).to_ascii_lowercase()
}

pub fn classify(address: IpAddr) -> Class {
    // Local NAT64, which a network may map onto any IPv4 address.
    if let IpAddr::V6(v6) = address
        && let [0x64, 0xff9b, 1, .., a, b] = v6.segments()
    {
        let ([a, b], [c, d]) = (a.to_be_bytes(), b.to_be_bytes());
        let class = classify(Ipv4Addr::new(a, b, c, d).into());
        if class.range == Range::Metadata {
            return class;
        }
    }
    match destination(address) {
        IpAddr::V4(address) => {
            let found = V4.iter().find(|(network, _)| network.contains(&address));
            found.map_or(Class { range: Range::Public, kind: "public" }, |(_, class)| *class)
        }
        IpAddr::V6(address) => {
            let found = V6.iter().find(|(network, _)| network.contains(&address));
            found.map_or(Class { range: Range::Unusable, kind: "not global unicast" }, |(_, class)| *class)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f10_metadata_services_are_denied_whatever_is_allowed() {
        let all = HostPolicy::new(["*"], vec!["0.0.0.0/0".parse().unwrap(), "::/0".parse().unwrap()]);
        for address in
            ["169.254.169.254", "168.63.129.16", "fd00:ec2::254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe"]
        {
            assert!(all.judge("a", address.parse().unwrap()).is_err(), "{address}");
        }
        for name in ["metadata.google.internal", "METADATA.goog.", "instance-data"] {
            assert!(all.judge_name(name).is_err(), "{name}");
        }
        let by_name = HostPolicy::new(["minio"], Vec::new());
        let by_network = HostPolicy::new([], vec!["10.0.0.0/8".parse().unwrap()]);
        let private = "10.1.2.3".parse().unwrap();
        assert!(by_name.judge("MinIO.", private).is_ok() && by_name.judge("other", private).is_err());
        assert!(by_network.judge("other", private).is_ok());
        assert!(by_name.judge_name("localhost").is_err() && all.judge_name("localhost").is_ok());
    }

    #[test]
    fn p6_addresses_are_classified_by_where_they_lead() {
        for (range, kind, addresses) in [
            (
                Range::Public,
                "public",
                &[
                    "1.1.1.1",
                    "9.255.255.255",
                    "11.0.0.0",
                    "100.63.255.255",
                    "100.128.0.0",
                    "168.63.129.17",
                    "172.15.255.255",
                    "172.32.0.0",
                    "192.167.255.255",
                    "198.20.0.0",
                    "223.255.255.255",
                    "2001:200::1",
                    "2001:4860:4860::8888",
                    "2606:4700::1111",
                    "2a00:1450:4001::1",
                    "3ffe::1",
                    "::ffff:8.8.8.8",
                    "64:ff9b::808:808",
                    "2002:808:808::1",
                ][..],
            ),
            (
                Range::Metadata,
                "link-local",
                &[
                    "169.254.169.254",
                    "169.254.170.2",
                    "::ffff:169.254.169.254",
                    "64:ff9b::a9fe:a9fe",
                    "2002:a9fe:a9fe::1",
                    "::169.254.169.254",
                    "64:ff9b:1::a9fe:a9fe",
                ],
            ),
            (Range::Metadata, "the host service of Azure", &["168.63.129.16"]),
            (
                Range::Metadata,
                "a metadata service",
                &["100.100.100.200", "192.0.0.192", "fd00:ec2::254", "fd20:ce::254"],
            ),
            (
                Range::Private,
                "private",
                &["10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.1", "fc00::1"],
            ),
            (Range::Private, "shared by a carrier's NAT", &["100.64.0.1"]),
            (Range::Private, "loopback", &["127.0.0.1", "127.255.255.254", "::1", "::127.0.0.1"]),
            (Range::Private, "for benchmarks", &["198.19.0.1"]),
            (Range::Private, "local NAT64", &["64:ff9b:1::808:808"]),
            (Range::Private, "site-local", &["fec0::1"]),
            (Range::Unusable, "unspecified", &["0.0.0.0", "0.1.2.3", "::"]),
            (Range::Unusable, "reserved", &["192.0.0.1", "240.0.0.1", "2001::1", "2001:2::1", "2001:20::1"]),
            (
                Range::Unusable,
                "for documentation",
                &["192.0.2.1", "198.51.100.7", "203.0.113.7", "2001:db8::1", "3fff::1"],
            ),
            (Range::Unusable, "a 6to4 relay", &["192.88.99.1"]),
            (Range::Unusable, "multicast", &["224.0.0.1", "239.255.255.250"]),
            (Range::Unusable, "broadcast", &["255.255.255.255"]),
            (Range::Unusable, "link-local", &["fe80::1"]),
            (Range::Unusable, "not global unicast", &["100::1", "4000::1", "5f00::1", "ff02::1"]),
        ] {
            for address in addresses {
                assert_eq!(classify(address.parse().unwrap()), Class { range, kind }, "{address}");
            }
        }
    }
}
