//! Makes one attempt to deliver one message to one webhook URL, and says what came back.

mod address;
mod headers;
mod sender;
#[cfg(test)]
mod sender_tests;
mod signature;

pub(crate) use headers::parse_headers;
pub(crate) use sender::{AttemptResult, ClientCertificate, DeliveryRequest, Sender, SenderConfig};
pub(crate) use signature::{Signed, SigningKey, WebhookId, verify};
