//! Names the source that a command is about.

use clap::Args;

use super::config_args::{ConfigArgs, NoFlags};
use super::exit::{Exit, Failure};
use super::output::Format;
use crate::config::schema::{Config, Source};

#[derive(Debug, Args)]
pub(super) struct SourceArgs {
    /// Source whose queues are meant [default: the only one of its kind]
    #[arg(long, value_name = "NAME")]
    source: Option<String>,
    /// How to print it
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub(super) output: Format,
    #[command(flatten)]
    pub(super) settings: ConfigArgs<NoFlags>,
}

impl SourceArgs {
    /// The source that is meant, of those that `of_kind` takes, with its name.
    pub(super) fn find<'a, T>(
        &self,
        config: &'a Config,
        kind: &str,
        of_kind: fn(&'a Source) -> Option<&'a T>,
    ) -> Result<(&'a str, &'a T), Failure> {
        let is_meant = |name: &str| self.source.as_ref().is_none_or(|wanted| wanted == name);
        let named = config.source.iter().filter_map(|(name, source)| Some((name.as_str(), of_kind(source)?)));
        let mut sources = named.filter(|(name, _)| is_meant(name));
        let none = || Failure::new(Exit::Config, format!("there is no such [source.NAME] of kind `{kind}`"));
        let found = sources.next().ok_or_else(none)?;
        if sources.next().is_some() {
            let several = format!("there are several sources of kind `{kind}`: name one with --source");
            return Err(Failure::new(Exit::Usage, several));
        }
        Ok(found)
    }
}
