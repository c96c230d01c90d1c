//! `journeyman guide`: prints a page of the documentation.

use clap::builder::PossibleValuesParser;

use super::exit::{Exit, ExitResult};
use super::output;
use crate::guide::PAGES;

pub(super) fn page_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PAGES.iter().map(|page| page.name))
}

pub(super) fn run(page: Option<&str>) -> ExitResult {
    match PAGES.iter().find(|known| Some(known.name) == page) {
        Some(page) => output::line(page.text.trim_end())?,
        None => {
            for page in PAGES {
                output::line(&format!("{:<14} {}", page.name, page.title()))?;
            }
        }
    }
    Ok(Exit::Success)
}
