//! What a check has found, and how commands print it.

use std::fmt::Write as _;

use serde::Serialize;

use super::exit::{Exit, ExitResult};
use super::output::{self, Format};
use journeyman_platform::redact;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Ok,
    Warning,
    Failed,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Check {
    pub(super) name: String,
    pub(super) state: State,
    pub(super) result: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    fix: Option<String>,
}

impl Check {
    pub(super) fn ok(name: impl Into<String>, result: impl Into<String>) -> Self {
        Self { name: name.into(), state: State::Ok, result: redacted(result.into()), fix: None }
    }

    pub(super) fn warning(name: impl Into<String>, result: impl Into<String>, fix: impl Into<String>) -> Self {
        let fix = Some(redacted(fix.into()));
        Self { name: name.into(), state: State::Warning, result: redacted(result.into()), fix }
    }

    pub(super) fn failed(name: impl Into<String>, result: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { state: State::Failed, ..Self::warning(name, result, fix) }
    }
}

fn redacted(text: String) -> String {
    redact::text(&text).into_owned()
}

/// Prints checks; the exit status says whether one failed.
pub(super) fn report(checks: &[Check], format: Format) -> ExitResult {
    let (warnings, failed) = (count(checks, State::Warning), count(checks, State::Failed));
    match format {
        Format::Table => output::print(&render(checks))?,
        Format::Json => {
            output::json(&serde_json::json!({ "checks": checks, "warnings": warnings, "failed": failed }))?;
        }
    }
    Ok(if failed == 0 { Exit::Success } else { Exit::Failed })
}

fn count(checks: &[Check], state: State) -> usize {
    checks.iter().filter(|check| check.state == state).count()
}

fn render(checks: &[Check]) -> String {
    let width = checks.iter().map(|check| check.name.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for check in checks {
        let (color, state) = match check.state {
            State::Ok => ("\x1b[32m", "ok"),
            State::Warning => ("\x1b[33m", "warning"),
            State::Failed => ("\x1b[31m", "failed"),
        };
        let indent = format!("\n{:7}  {:width$}  ", "", "");
        let mut text = check.result.trim_end().replace('\n', &indent);
        if let Some(fix) = check.fix.as_ref().filter(|fix| !fix.is_empty()) {
            // Writing to a String cannot fail.
            _ = write!(text, "{indent}> {}", fix.trim_end().replace('\n', &format!("{indent}  ")));
        }
        _ = writeln!(out, "{color}{state:<7}\x1b[0m  {:width$}  {text}", check.name);
    }
    let (warnings, failed) = (count(checks, State::Warning), count(checks, State::Failed));
    let noun = if warnings == 1 { "warning" } else { "warnings" };
    _ = writeln!(out, "\n{} ok, {warnings} {noun}, {failed} failed", checks.len() - warnings - failed);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_aligned_and_an_empty_fix_is_not_shown() {
        let checks = [
            Check::ok("a", "one line"),
            Check::failed("a longer name", "two\nlines", "mend\nboth"),
            Check::warning("b", "found", ""),
        ];
        let plain = anstream::adapter::strip_str(&render(&checks)).to_string();
        let expected = "\
ok       a              one line
failed   a longer name  two
                        lines
                        > mend
                          both
warning  b              found

1 ok, 1 warning, 1 failed
";
        assert_eq!(plain, expected);
    }
}
