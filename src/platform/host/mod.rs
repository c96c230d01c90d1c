//! This machine, as far as the worker has to know it.

pub mod beneath;
pub mod caches;
pub mod clock;
pub mod containment;
pub mod crash_points;
pub mod file_lock;
pub mod host_errors;
pub mod journal;
pub mod mounts;
pub mod process;
pub mod program_path;
pub mod remove_tree;
pub mod resources;
pub mod run_program;
pub mod service_manager;
pub mod socket_owner;
pub mod task_user;
pub mod termination_notice;
pub mod tls_config;
pub mod work_dir;
pub mod worker_id_lock;
