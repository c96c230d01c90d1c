//! How readings of metadata services become notices, and when the next request is sent.

use std::time::Duration;

use journeyman_domain::termination_notice::{
    NOTICE_MIN, NOTICE_RETRY, NoticeEvent, NoticeReading, NoticeTracker, PollSchedule, Termination,
};

use crate::rules::support::at;

const FIVE: PollSchedule = PollSchedule::with_interval(Duration::from_secs(5));
const NOTHING: Option<NoticeReading> = Some(NoticeReading::Nothing);
const SOON: Option<NoticeReading> = Some(NoticeReading::Terminating(Termination::Soon));

fn terminating(seconds: u64) -> Option<NoticeReading> {
    Some(NoticeReading::Terminating(Termination::At(at(seconds))))
}

fn notice(seconds: u64) -> Option<NoticeEvent> {
    Some(NoticeEvent::Terminating(Termination::At(at(seconds))))
}

#[test]
fn a_notice_is_reported_once() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    assert_eq!(tracker.on_reading(terminating(120), at(0), at(0)), notice(120));
    assert_eq!(tracker.next_at(), at(5));
    // The service's clock has a resolution of a second.
    for (now, again) in [(5, 120), (10, 121), (15, 119)] {
        assert_eq!(tracker.on_reading(terminating(again), at(now), at(now)), None);
    }
}

#[test]
fn an_earlier_time_is_reported_and_a_later_one_is_not() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    assert_eq!(tracker.on_reading(terminating(120), at(0), at(0)), notice(120));
    assert_eq!(tracker.on_reading(terminating(300), at(5), at(5)), None);
    assert_eq!(tracker.on_reading(terminating(60), at(10), at(10)), notice(60));
    assert_eq!(tracker.on_reading(terminating(120), at(15), at(15)), None);
}

#[test]
fn a_notice_that_is_withdrawn_and_returns_is_not_reported_again() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    tracker.on_reading(terminating(120), at(0), at(0));
    assert_eq!(tracker.on_reading(NOTHING, at(5), at(5)), None);
    assert_eq!(tracker.on_reading(terminating(120), at(15), at(15)), None);
}

#[test]
fn a_time_in_the_past_leaves_the_shortest_notice() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    let event = tracker.on_reading(terminating(10), at(100), at(100));
    assert_eq!(event, Some(NoticeEvent::Terminating(Termination::At(at(100).plus(NOTICE_MIN)))));
    assert_eq!(tracker.on_reading(terminating(10), at(105), at(105)), None, "the deadline does not move with time");
}

#[test]
fn a_notice_without_a_time_may_be_followed_by_one_with_a_time() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    assert_eq!(tracker.on_reading(SOON, at(0), at(0)), Some(NoticeEvent::Terminating(Termination::Soon)));
    assert_eq!(tracker.on_reading(SOON, at(5), at(5)), None);
    assert_eq!(tracker.on_reading(terminating(60), at(10), at(10)), notice(60));
}

#[test]
fn a_failing_watch_retries_soon_and_reports_its_failure_and_recovery_once() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    let mut now = at(0);
    let mut events = Vec::new();
    for _ in 0..20 {
        events.extend(tracker.on_reading(None, now, now));
        let wait = tracker.next_at().since(now);
        assert!(wait >= NOTICE_RETRY.first / 2 && wait <= NOTICE_RETRY.max, "{wait:?}");
        now = tracker.next_at();
    }
    assert_eq!(events, [NoticeEvent::WatchFailing]);
    assert_eq!(tracker.on_reading(NOTHING, now, now), Some(NoticeEvent::WatchRecovered));
    assert_eq!(tracker.on_reading(NOTHING, now, now), None);
}

#[test]
fn a_reply_that_takes_longer_than_the_interval_is_not_followed_by_a_burst() {
    let mut tracker = NoticeTracker::new(FIVE, 1);
    tracker.on_reading(NOTHING, at(0), at(17));
    assert_eq!(tracker.next_at(), at(17));
    tracker.on_reading(NOTHING, at(17), at(18));
    assert_eq!(tracker.next_at(), at(22));
}
