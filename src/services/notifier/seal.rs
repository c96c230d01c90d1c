//! Encrypts what the notifier's store holds of secrets, with keys that are not in the store.
//!
//! A sealed secret is a version, a random nonce, and the output of ChaCha20-Poly1305.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use secrecy::{ExposeSecret as _, SecretSlice};

const VERSION: u8 = 1;

/// Parses from the base64 of 32 bytes.
pub struct SealKey(LessSafeKey);

/// Says what a key has to be; never holds the key.
#[derive(Debug, thiserror::Error)]
#[error("a seal key is the base64 of 32 random bytes; `openssl rand -base64 32` makes one")]
pub struct InvalidSealKey;

impl std::str::FromStr for SealKey {
    type Err = InvalidSealKey;

    fn from_str(text: &str) -> Result<Self, InvalidSealKey> {
        let bytes = STANDARD.decode(text).map(SecretSlice::from).map_err(|_| InvalidSealKey)?;
        let key = UnboundKey::new(&CHACHA20_POLY1305, bytes.expose_secret()).map_err(|_| InvalidSealKey)?;
        Ok(Self(LessSafeKey::new(key)))
    }
}

/// The first one seals, each of them opens.
pub struct SealKeys(pub Vec<SealKey>);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    #[error("there is no key for the secrets in the store: set `notifier.seal_key_files`")]
    NoKey,
    #[error("the system has no random numbers")]
    NoRandom,
    #[error("what the store holds is no sealed secret of this version: is it of a newer notifier?")]
    Version,
    #[error("no key of `notifier.seal_key_files` opens it: is the one that sealed it missing, or was it changed?")]
    WrongKey,
}

impl SealKeys {
    /// `context` says whose secret it is, such as the name of the endpoint: it is opened with the same one only.
    pub(crate) fn seal(&self, context: &str, clear: &[u8]) -> Result<Vec<u8>, SealError> {
        let SealKey(key) = self.0.first().ok_or(SealError::NoKey)?;
        let mut nonce = [0; NONCE_LEN];
        SystemRandom::new().fill(&mut nonce).map_err(|_| SealError::NoRandom)?;
        let mut bytes = clear.to_vec();
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(context), &mut bytes)
            .map_err(|_| SealError::NoKey)?;
        Ok([&[VERSION], &nonce[..], &bytes].concat())
    }

    pub(crate) fn open(&self, context: &str, sealed: &[u8]) -> Result<SecretSlice<u8>, SealError> {
        let Some((&VERSION, rest)) = sealed.split_first() else { return Err(SealError::Version) };
        let (nonce, sealed) = rest.split_first_chunk::<NONCE_LEN>().ok_or(SealError::Version)?;
        if self.0.is_empty() {
            return Err(SealError::NoKey);
        }
        let open = |SealKey(key): &SealKey| {
            let mut bytes = sealed.to_vec();
            let clear = key.open_in_place(Nonce::assume_unique_for_key(*nonce), Aad::from(context), &mut bytes);
            let length = clear.ok()?.len();
            bytes.truncate(length);
            Some(SecretSlice::from(bytes))
        };
        self.0.iter().find_map(open).ok_or(SealError::WrongKey)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> SealKeys {
        SealKeys(bytes.iter().map(|byte| STANDARD.encode([*byte; 32]).parse().expect("a key")).collect())
    }

    #[test]
    fn a_secret_opens_with_its_context_only() {
        let keys = keys(&[1]);
        for clear in [&b""[..], b"whsec_secret", &[0xff; 5000]] {
            let sealed = keys.seal("endpoint/a", clear).unwrap();
            assert_eq!(keys.open("endpoint/a", &sealed).unwrap().expose_secret(), clear);
            assert_eq!(keys.open("endpoint/b", &sealed).unwrap_err(), SealError::WrongKey);
            assert_ne!(sealed, keys.seal("endpoint/a", clear).unwrap(), "a nonce is used once");
        }
    }

    #[test]
    fn the_first_key_seals_and_each_one_opens() {
        let (old, new) = (keys(&[1]), keys(&[2]));
        let both = keys(&[2, 1]);
        assert_eq!(both.open("a", &old.seal("a", b"clear").unwrap()).unwrap().expose_secret(), b"clear");
        assert_eq!(new.open("a", &both.seal("a", b"clear").unwrap()).unwrap().expose_secret(), b"clear");
        assert_eq!(old.open("a", &both.seal("a", b"clear").unwrap()).unwrap_err(), SealError::WrongKey);
    }

    #[test]
    fn what_was_changed_or_cut_or_is_of_another_version_does_not_open() {
        let keys = keys(&[1]);
        let sealed = keys.seal("a", b"clear").unwrap();
        for (index, _) in sealed.iter().enumerate() {
            let mut changed = sealed.clone();
            changed[index] ^= 1;
            assert!(keys.open("a", &changed).is_err(), "byte {index}");
            assert!(keys.open("a", &sealed[..index]).is_err(), "cut to {index}");
        }
        assert_eq!(keys.open("a", &[&[2], &sealed[1..]].concat()).unwrap_err(), SealError::Version);
        let none = SealKeys(Vec::new());
        assert_eq!(none.open("a", &sealed).unwrap_err(), SealError::NoKey);
        assert_eq!(none.seal("a", b"").unwrap_err(), SealError::NoKey);
    }

    #[test]
    fn a_key_that_cannot_be_used_is_refused_and_none_is_shown() {
        for text in ["", "c2VjcmV0", "sec!ret", &STANDARD.encode([1; 31]), &STANDARD.encode([1; 33])] {
            let error = text.parse::<SealKey>().err().expect("it is invalid").to_string();
            assert!(error.contains("32 random bytes") && !error.contains("c2Vj"), "{error}");
        }
    }
}
