//! The tests that need nothing but the domain, so they link no client, store or server.

mod model;
mod rules;
mod sim;
