//! Makes one attempt to deliver one message to one webhook URL, and says what came back.

mod address;
mod headers;
mod sender;
#[cfg(test)]
mod sender_tests;
mod signature;

pub(super) use headers::parse_headers;
pub(super) use sender::{AttemptResult, DeliveryRequest};
pub use sender::{ClientCertificate, Sender, SenderConfig};
pub use signature::{Signed, SigningKey, verify};
