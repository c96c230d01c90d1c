//! `journeyman guide`: prints a page of the documentation.

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::exit::{Exit, ExitResult};
use super::output;
use crate::guide::PAGES;

#[derive(Debug, Args)]
pub(super) struct GuideArgs {
    /// Page [default: list the pages]
    #[arg(value_name = "PAGE", value_parser = PossibleValuesParser::new(PAGES.iter().map(|page| page.name)))]
    page: Option<String>,
}

pub(super) fn run(arguments: &GuideArgs) -> ExitResult {
    match PAGES.iter().find(|page| Some(page.name) == arguments.page.as_deref()) {
        Some(page) => output::line(page.text.trim_end())?,
        None => {
            for page in PAGES {
                output::line(&format!("{:<14} {}", page.name, page.title()))?;
            }
        }
    }
    Ok(Exit::Success)
}
