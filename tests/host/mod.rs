//! Termination notices: local metadata services that behave as documented, the watch, and whole workers that get a notice.

mod aws;
mod azure;
mod gcp;
mod metadata_service;
mod notice_file;
mod notice_watch;
mod termination;
