//! This machine, as far as the worker has to know it.

pub mod clock;
pub mod containment;
pub mod crash;
pub(crate) mod folder;
pub(crate) mod journal;
pub(crate) mod lock;
pub(crate) mod mounts;
pub mod notice;
pub(crate) mod presence;
pub(crate) mod process;
pub mod program;
pub(crate) mod remains;
pub mod room;
pub(crate) mod spare;
pub mod systemd;
pub(crate) mod tls;
