//! The worker as a whole: rules, loop, a real source, a real queue, and handlers.

#![expect(unreachable_pub, reason = "a test binary has no outside")]

mod long;
mod outcomes;
mod scripted;
mod service;
