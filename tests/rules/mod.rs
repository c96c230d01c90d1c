//! The rules, one module an invariant: each test drives a pure machine by hand and carries the number of the invariant.

#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::wildcard_enum_match_arm,
    reason = "a test that meets what it does not expect ends there"
)]

mod any_claim;
mod any_poll;
mod any_worker;
mod arithmetic;
mod ends_from_outside;
mod i00_architecture;
mod i01_no_outcome_after_the_lease;
mod i02_no_payload_outlives_its_claim;
mod i03_no_start_on_a_late_reply;
mod i04_extending_starts_in_time;
mod i05_transient_errors_never_end_a_claim;
mod i06_one_payload_a_claim;
mod i07_overlap_is_reported;
mod i08_never_more_claims_than_slots;
mod i09_one_outcome_accepted;
mod i10_extending_until_acknowledged;
mod i11_calls_do_not_wait_for_each_other;
mod i12_deleted_only_after_a_definite_answer;
mod i13_a_receipt_is_used_once;
mod i14_failed_deletes_are_reported;
mod i15_one_alert_a_message;
mod i16_priority_order;
mod i17_unreadable_messages;
mod i21_verdicts_and_outcomes;
mod i22_host_termination;
mod i22_shutdown;
mod i23_release_is_quick;
mod i24_exit_reason;
mod i25_no_retry_inside_a_run;
mod i26_unproven_cleanup_keeps_the_slot;
mod i27_orphans_are_killed_first;
mod i28_nothing_is_resumed;
mod i33_an_unhealthy_host_pauses;
mod i34_a_command_is_about_one_claim;
mod imports;
mod lifecycle;
mod metadata_services;
mod sidecar;
mod support;
