//! I1: what ran a payload reports by itself only what the rules would report, and only while the claim may be acted on.

use journeyman::domain::outcome::{Cleanup, Outcome, Verdict};
use journeyman::domain::poll::Capabilities;
use journeyman::domain::prompt::{AtEnd, Left, Orders, may_be_prompt};

use crate::support::at;

fn clear() -> AtEnd {
    AtEnd {
        verdict: Verdict::Completed,
        emptiness: Cleanup::Complete,
        left: Left::Nothing,
        orders: Orders::None,
        usable_until: at(10),
    }
}

#[test]
fn i01_a_completed_payload_that_left_nothing_is_reported_at_once_until_its_lease_is_over() {
    assert_eq!(clear().reported_at_once(at(9)), Some(Outcome::Completed));
    for now in [10, 11] {
        assert_eq!(clear().reported_at_once(at(now)), None);
    }
}

#[test]
fn i01_the_rules_are_asked_where_anything_else_is_to_be_done_or_said() {
    let others = [
        Verdict::Failed,
        Verdict::Intermittent,
        Verdict::Unavailable,
        Verdict::Internal,
        Verdict::HostFault,
        Verdict::ServiceDown,
    ];
    let verdicts = others.map(|verdict| AtEnd { verdict, ..clear() });
    let rest = [
        AtEnd { emptiness: Cleanup::Incomplete, ..clear() },
        AtEnd { left: Left::Something, ..clear() },
        AtEnd { orders: Orders::ToEnd, ..clear() },
    ];
    for end in verdicts.into_iter().chain(rest) {
        assert_eq!(end.reported_at_once(at(1)), None, "{end:?}");
    }
}

#[test]
fn i01_only_what_ends_with_its_worker_is_reported_before_it_is_written_down() {
    let manner = |ends_with_worker| Capabilities {
        long_poll: true,
        supports_recovery: false,
        reports_cancellation: false,
        connection_scoped: ends_with_worker,
    };
    assert!(may_be_prompt(manner(true)) && !may_be_prompt(manner(false)));
}
