//! The worker as a whole: rules, loop, a real source, a real queue, and handlers.

mod blocking_handlers;
mod duplicate_worker_id;
mod faults;
mod outcomes;
mod recovery;
mod scripted;
mod service;
mod stopped_in_prepare;
mod unhealthy_host;
