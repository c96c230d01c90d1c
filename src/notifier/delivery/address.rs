//! Judges the address that a webhook would be delivered to.
//!
//! Whoever registers a URL chooses where the notifier connects to. It must not reach what only the notifier's own network can
//! reach: other services, metadata services, the host itself.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The special-purpose addresses that IANA registers, without those that lead to public services.
const DENIED_V4: [(Ipv4Net, &str); 17] = [
    (v4([0, 0, 0, 0], 8), "unspecified"),
    (v4([10, 0, 0, 0], 8), "private"),
    (v4([100, 64, 0, 0], 10), "shared by a carrier's NAT"),
    (v4([127, 0, 0, 0], 8), "loopback"),
    (v4([168, 63, 129, 16], 32), "the host service of Azure"),
    (v4([169, 254, 0, 0], 16), "link-local"),
    (v4([172, 16, 0, 0], 12), "private"),
    (v4([192, 0, 0, 0], 24), "reserved"),
    (v4([192, 0, 2, 0], 24), "for documentation"),
    (v4([192, 88, 99, 0], 24), "a 6to4 relay"),
    (v4([192, 168, 0, 0], 16), "private"),
    (v4([198, 18, 0, 0], 15), "for benchmarks"),
    (v4([198, 51, 100, 0], 24), "for documentation"),
    (v4([203, 0, 113, 0], 24), "for documentation"),
    (v4([224, 0, 0, 0], 4), "multicast"),
    (v4([255, 255, 255, 255], 32), "broadcast"),
    (v4([240, 0, 0, 0], 4), "reserved"),
];

/// The first match counts. What is not in [`GLOBAL_UNICAST`] is denied anyway.
const DENIED_V6: [(Ipv6Net, &str); 15] = [
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 128), "unspecified"),
    (v6([0, 0, 0, 0, 0, 0, 0, 1], 128), "loopback"),
    (v6([0, 0, 0, 0, 0, 0, 0, 0], 96), "IPv4-compatible"),
    (MAPPED, "IPv4-mapped"),
    (NAT64, "NAT64"),
    (v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), "local NAT64"),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 32), "Teredo"),
    (v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23), "reserved"),
    (v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32), "for documentation"),
    (v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16), "6to4"),
    (v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20), "for documentation"),
    (v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7), "private"),
    (v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10), "link-local"),
    (v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10), "site-local"),
    (v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8), "multicast"),
];

const GLOBAL_UNICAST: Ipv6Net = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);
const MAPPED: Ipv6Net = v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96);
const NAT64: Ipv6Net = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

const fn v4([a, b, c, d]: [u8; 4], prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6([a, b, c, d, e, f, g, h]: [u16; 8], prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, d, e, f, g, h), prefix)
}

/// Allows public addresses, and those of the listed networks.
#[derive(Debug, Clone)]
pub(super) struct AddressPolicy {
    allowed: Vec<IpNet>,
}

impl AddressPolicy {
    pub(super) const fn new(allowed: Vec<IpNet>) -> Self {
        Self { allowed }
    }

    /// # Errors
    ///
    /// What kind of address it is, if it is denied.
    pub(super) fn judge(&self, address: IpAddr) -> Result<(), &'static str> {
        let Some(kind) = denied_kind(address) else { return Ok(()) };
        if !self.allowed.iter().any(|network| network.contains(&address)) {
            return Err(kind);
        }
        // A network whose only way to IPv4 is NAT64 lists its prefix; that opens no private IPv4 network.
        embedded_v4(address).map_or(Ok(()), |inner| self.judge(inner.into()))
    }
}

fn denied_kind(address: IpAddr) -> Option<&'static str> {
    match address {
        IpAddr::V4(address) => DENIED_V4.iter().find(|(network, _)| network.contains(&address)).map(|(_, kind)| *kind),
        IpAddr::V6(address) => DENIED_V6
            .iter()
            .find(|(network, _)| network.contains(&address))
            .map(|(_, kind)| *kind)
            .or_else(|| (!GLOBAL_UNICAST.contains(&address)).then_some("not global unicast")),
    }
}

fn embedded_v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V6(address) if MAPPED.contains(&address) || NAT64.contains(&address) => {
            let [.., a, b, c, d] = address.octets();
            Some(Ipv4Addr::new(a, b, c, d))
        }
        IpAddr::V4(_) | IpAddr::V6(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(allowed: &[&str], address: &str) -> Result<(), &'static str> {
        let allowed = allowed.iter().map(|network| network.parse().expect("it is a network")).collect();
        AddressPolicy::new(allowed).judge(address.parse().expect("it is an address"))
    }

    #[test]
    fn public_addresses_are_allowed() {
        for address in [
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
        ] {
            assert_eq!(judge(&[], address), Ok(()), "{address}");
        }
    }

    #[test]
    fn p6_special_addresses_are_denied() {
        for (address, kind) in [
            ("0.0.0.0", "unspecified"),
            ("0.1.2.3", "unspecified"),
            ("10.0.0.1", "private"),
            ("10.255.255.255", "private"),
            ("100.64.0.1", "shared by a carrier's NAT"),
            ("100.100.100.200", "shared by a carrier's NAT"),
            ("127.0.0.1", "loopback"),
            ("127.255.255.254", "loopback"),
            ("168.63.129.16", "the host service of Azure"),
            ("169.254.169.254", "link-local"),
            ("172.16.0.1", "private"),
            ("172.31.255.255", "private"),
            ("192.0.0.192", "reserved"),
            ("192.0.2.1", "for documentation"),
            ("192.88.99.1", "a 6to4 relay"),
            ("192.168.1.1", "private"),
            ("198.19.0.1", "for benchmarks"),
            ("198.51.100.7", "for documentation"),
            ("203.0.113.7", "for documentation"),
            ("224.0.0.1", "multicast"),
            ("239.255.255.250", "multicast"),
            ("240.0.0.1", "reserved"),
            ("255.255.255.255", "broadcast"),
            ("::", "unspecified"),
            ("::1", "loopback"),
            ("::127.0.0.1", "IPv4-compatible"),
            ("::8.8.8.8", "IPv4-compatible"),
            ("::ffff:169.254.169.254", "IPv4-mapped"),
            ("::ffff:8.8.8.8", "IPv4-mapped"),
            ("64:ff9b::a9fe:a9fe", "NAT64"),
            ("64:ff9b::808:808", "NAT64"),
            ("64:ff9b:1::a9fe:a9fe", "local NAT64"),
            ("100::1", "not global unicast"),
            ("2001::1", "Teredo"),
            ("2001:2::1", "reserved"),
            ("2001:20::1", "reserved"),
            ("2001:db8::1", "for documentation"),
            ("2002:a9fe:a9fe::1", "6to4"),
            ("2002:808:808::1", "6to4"),
            ("3fff::1", "for documentation"),
            ("4000::1", "not global unicast"),
            ("5f00::1", "not global unicast"),
            ("fc00::1", "private"),
            ("fd00:ec2::254", "private"),
            ("fe80::1", "link-local"),
            ("fec0::1", "site-local"),
            ("ff02::1", "multicast"),
        ] {
            assert_eq!(judge(&[], address), Err(kind), "{address}");
        }
    }

    #[test]
    fn listed_networks_are_allowed_and_no_others() {
        assert_eq!(judge(&["10.1.0.0/16"], "10.1.2.3"), Ok(()));
        assert_eq!(judge(&["10.1.0.0/16"], "10.2.0.1"), Err("private"));
        assert_eq!(judge(&["fd00:1::/32", "::1/128"], "::1"), Ok(()));
        assert_eq!(judge(&["fd00:1::/32"], "fd00:2::1"), Err("private"));
    }

    #[test]
    fn a_listed_prefix_opens_no_private_ipv4_network() {
        assert_eq!(judge(&["64:ff9b::/96"], "64:ff9b::808:808"), Ok(()));
        assert_eq!(judge(&["64:ff9b::/96"], "64:ff9b::a9fe:a9fe"), Err("link-local"));
        assert_eq!(judge(&["::ffff:0:0/96"], "::ffff:127.0.0.1"), Err("loopback"));
        assert_eq!(judge(&["::ffff:0:0/96", "127.0.0.0/8"], "::ffff:127.0.0.1"), Ok(()));
    }
}
