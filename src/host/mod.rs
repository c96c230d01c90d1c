//! This machine, as far as the worker has to know it.

pub mod clock;
pub mod containment;
pub mod crash_points;
pub(crate) mod crypto_provider;
pub(crate) mod file_lock;
pub mod host_errors;
pub(crate) mod journal;
pub(crate) mod mounts;
pub(crate) mod process;
pub mod program_path;
pub mod resources;
pub(crate) mod run_program;
pub(crate) mod service_manager;
pub mod termination_notice;
pub(crate) mod tls_config;
pub(crate) mod work_dir;
pub(crate) mod worker_id_lock;
