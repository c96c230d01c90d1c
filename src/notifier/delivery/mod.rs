//! Makes one attempt to deliver one message to one webhook URL, and says what came back.

mod address;
mod resolver;
mod sender;
#[cfg(test)]
mod sender_tests;
mod signature;

pub(crate) use sender::{AttemptResult, DeliveryRequest, Sender, SenderConfig};
pub(crate) use signature::{SigningKey, WebhookId};
