//! The rules of journeyman without a standard library under them.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[path = "../../../src/domain/mod.rs"]
pub mod domain;
