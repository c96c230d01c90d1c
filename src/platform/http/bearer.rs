//! Bearer tokens of servers.

use std::hint::black_box;

use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use sha2::{Digest as _, Sha256};

/// The hash of a token.
#[derive(Clone, Copy)]
pub struct BearerToken([u8; 32]);

impl BearerToken {
    pub fn new(text: &str) -> Self {
        Self(Sha256::digest(text).into())
    }

    /// Tells if the request has it; `None` if the request has no token.
    pub fn is_in(&self, headers: &HeaderMap) -> Option<bool> {
        let text = headers.get(AUTHORIZATION)?.to_str().unwrap_or_default();
        let (scheme, given) = text.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| self.matches(given.trim()))
    }

    /// Compares in constant time.
    fn matches(&self, token: &str) -> bool {
        let other: [u8; 32] = Sha256::digest(token).into();
        self.0.iter().zip(other).fold(0, |bits, (own, other)| black_box(bits | (own ^ other))) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_matches_itself_only() {
        let token = BearerToken::new("t0ken-of-tests");
        assert!(token.matches("t0ken-of-tests"));
        for other in ["", "t0ken-of-test", "t0ken-of-testsX"] {
            assert!(!token.matches(other), "{other}");
        }
    }
}
