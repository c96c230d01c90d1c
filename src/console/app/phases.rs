//! Phases of claims, as workers record them.

use journeyman_domain::limits::CONSOLE_OVERVIEW_TIMEOUT;
use journeyman_worker::engine::ClaimHistory;
use journeyman_worker::engine::status::PhaseStatus;
use tokio::time::timeout;

use super::Console;
use super::targets::Target;
use crate::console::picture::Bar;
use crate::console::rows::precise;
use crate::control::WorkerStatusReply;

/// The colours of the phases of a claim.
pub(super) const PHASES: [(&str, &str); 6] = [
    ("wait", "waiting"),
    ("claim", "claim"),
    ("prepare", "prepare"),
    ("run", "run"),
    ("upload", "upload"),
    ("report", "report"),
];

pub(super) fn phase_class(phase: &str) -> &'static str {
    PHASES.iter().find(|(class, _)| *class == phase).map_or("end", |(class, _)| class)
}

/// The claims of a worker's last hour; none if it does not answer.
pub(super) async fn history(console: &Console, target: &Target<WorkerStatusReply>) -> Vec<ClaimHistory> {
    match (target.address(), &console.history) {
        (Some(address), _) => timeout(CONSOLE_OVERVIEW_TIMEOUT, address.get("history.json"))
            .await
            .ok()
            .and_then(Result::ok)
            .unwrap_or_default(),
        (None, Some(history)) => history().await.unwrap_or_default(),
        (None, None) => Vec::new(),
    }
}

/// The phases of a claim, `now` being 0.
pub(super) fn bars(claim: &ClaimHistory, href: Option<&str>) -> Vec<Bar> {
    let bar = |phase: &PhaseStatus| {
        let from = -phase.seconds_ago;
        let took = phase.duration_seconds.unwrap_or(phase.seconds_ago);
        let class = if phase.phase == "run" && is_lost(claim) { "lost" } else { phase_class(&phase.phase) };
        let title = format!("{} {}", phase.phase, precise(took));
        Bar { from, to: from + took, class, title, href: href.map(str::to_owned) }
    };
    claim.phases.iter().map(bar).collect()
}

fn is_lost(claim: &ClaimHistory) -> bool {
    claim.outcome.as_deref().is_some_and(|outcome| outcome.starts_with("lost"))
}
