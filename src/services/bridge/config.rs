//! The section of a bridge.

use serde::{Deserialize, Serialize};

use journeyman_platform::settings::values::built_in;
use journeyman_worker::handler::RunTime;

/// A bridge from one source to another.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Bridge {
    /// Name of the source whose tasks or requests are claimed.
    pub from: String,
    /// Name of the source of the other kind that they are sent to. Nothing is claimed from it.
    pub to: String,
    /// Maximum time that the other side may take.
    #[serde(default = "bridge_run_time")]
    pub max_run_time: RunTime,
}

fn bridge_run_time() -> RunTime {
    built_in("25m")
}
