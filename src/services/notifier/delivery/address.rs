//! Judges the address that a webhook would be delivered to.
//!
//! The URL of an endpoint decides where the notifier connects to, and callers of the API choose it.

use std::net::IpAddr;

use ipnet::IpNet;

use journeyman_platform::http::address::{Class, HostPolicy, Range};

/// Allows public addresses, and those of the listed networks.
#[derive(Debug, Clone)]
pub(super) struct AddressPolicy(HostPolicy);

impl AddressPolicy {
    pub(super) fn new(allowed: Vec<IpNet>) -> Self {
        Self(HostPolicy::new([], allowed))
    }

    /// # Errors
    ///
    /// Why it is denied.
    pub(super) fn judge(&self, address: IpAddr) -> Result<(), String> {
        self.0.judge("", address).map_err(|class| denied(&format!("the host's address {address}"), class))
    }

    /// A proxy would resolve it.
    ///
    /// # Errors
    ///
    /// Why it is denied.
    pub(super) fn judge_name(&self, name: &str) -> Result<(), String> {
        match self.0.judge_name(name) {
            Err(class) if class.range == Range::Metadata => Err(denied("the host", class)),
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

fn denied(what: &str, class: Class) -> String {
    let advice = match class.range {
        Range::Public | Range::Private | Range::Unusable => {
            "add its network to the allowed ones if webhooks may reach it"
        }
        Range::Metadata => "webhooks never reach it",
    };
    format!("{what} is {}; {advice}", class.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(allowed: &[&str], address: &str) -> Result<(), String> {
        let allowed = allowed.iter().map(|network| network.parse().expect("it is a network")).collect();
        AddressPolicy::new(allowed).judge(address.parse().expect("it is an address"))
    }

    #[test]
    fn p6_listed_networks_are_allowed_and_no_others() {
        for (allowed, address) in [
            ("10.1.0.0/16", "10.1.2.3"),
            ("10.1.0.0/16", "64:ff9b::a01:203"),
            ("127.0.0.0/8", "::ffff:127.0.0.1"),
            ("::1/128", "::1"),
            ("fd00:1::/32", "fd00:1::1"),
        ] {
            assert_eq!(judge(&[allowed], address), Ok(()), "{address}");
        }
        for (allowed, address) in [
            ("10.1.0.0/16", "10.2.0.1"),
            ("fd00:1::/32", "fd00:2::1"),
            // A listed prefix opens no private IPv4 network.
            ("64:ff9b::/96", "64:ff9b::a00:1"),
            ("::ffff:0:0/96", "::ffff:127.0.0.1"),
        ] {
            assert!(judge(&[allowed], address).unwrap_err().contains("add its network"), "{address}");
        }
    }

    #[test]
    fn p6_metadata_services_are_denied_whatever_is_listed() {
        for address in ["169.254.169.254", "168.63.129.16", "fd00:ec2::254", "64:ff9b::a9fe:a9fe"] {
            assert!(judge(&["0.0.0.0/0", "::/0"], address).unwrap_err().ends_with("never reach it"), "{address}");
        }
    }
}
