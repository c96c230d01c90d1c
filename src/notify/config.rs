//! The section of the notifier that other roles tell.

use serde::{Deserialize, Serialize};

use journeyman_platform::settings::rules::Rules;
use journeyman_platform::settings::values::{SecretFile, Url};

/// Tells a notifier which tasks of an embedded queue were resolved, which claims of a worker have ended, and which requests a controller has put aside.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(debug_assertions, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Notify {
    /// Address of the notifier, such as `http://127.0.0.1:7090` [built-in: none].
    pub url: Option<Url>,
    /// File with the notifier's token.
    pub token_file: Option<SecretFile>,
    /// Types of the events. A `*` at the end stands for the rest.
    pub events: Vec<String>,
}

impl Default for Notify {
    fn default() -> Self {
        Self { url: None, token_file: None, events: every_event() }
    }
}

pub(crate) fn every_event() -> Vec<String> {
    vec!["*".to_owned()]
}

impl Notify {
    pub(crate) fn check(&self, rules: &mut Rules<'_>) {
        if self.url.is_some() != self.token_file.is_some() {
            let help = "`url` and `token_file` belong together";
            rules.error("notify", "url", "[notify] has one of `url` and `token_file`".to_owned(), help);
        }
    }
}
