//! What every section of the configuration stands on: typed values, secrets, the environment, and the loader that merges
//! file, environment and flags, and places the errors.

pub mod broker;
pub mod environment;
pub mod key;
pub mod load;
pub mod problem;
pub mod rules;
pub mod secrets;
pub mod values;

pub use environment::Environment;
pub use problem::{Document, Problem, Problems, ValueOrigin};

pub use key::Setting;
