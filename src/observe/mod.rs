//! What the outside sees of a running journeyman.

pub mod log;
