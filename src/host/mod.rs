//! This machine, as far as the worker has to know it.

pub mod clock;
pub(crate) mod folder;
pub mod notice;
pub mod room;
pub(crate) mod tls;
