//! A task as its queue knows it: status, log, and why it waits or did not complete.

pub(crate) mod bulk;
pub(crate) mod card;
pub(crate) mod definition;
pub(crate) mod log;
pub(crate) mod status;
