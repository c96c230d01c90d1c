//! Decides when a worker reports its activity to the controller.
//!
//! A controller keeps a group of workers as long as it receives reports of requests: also while one long task is all
//! there is, and without one report per request at thousands of requests a second. One known controller heeds a
//! report only if another one follows within a second, so reports are sent in pairs.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::time::Instant;
use crate::named_enum;

named_enum! {
    /// What is reported, with its name on the wire.
    #[derive(PartialOrd, Ord, Hash)]
    pub enum ActivityReport {
        Started = "started",
        /// It takes requests, and holds none.
        Ready = "ready",
        /// It received a request, or works on one.
        RequestReceived = "request-received",
    }
}

/// Between two reports of requests, and before the second of a pair: a worker never sends more than two a second.
pub const REPORT_INTERVAL_MIN: Duration = Duration::from_millis(500);

/// A controller may stop a worker that is ready, so that it says so only after being idle for this long.
pub const IDLE_BEFORE_READY: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The broker is reachable, for the first time or again.
    Connected,
    Disconnected,
    Ready,
    /// Claims were granted or extended since the last event.
    ClaimsReceived,
    ClaimsHeld(usize),
    Tick,
}

#[derive(Debug, Default)]
pub struct ActivityReporter {
    /// How often a long task is reported while nothing else is.
    repeat_interval: Duration,
    connected: bool,
    started_sent: bool,
    ready: bool,
    claims_held: usize,
    idle_since: Option<Instant>,
    /// The last report was of a request.
    busy_sent: bool,
    pending: bool,
    /// The time of the second report of a pair.
    duplicate_at: Option<Instant>,
    last_sent_at: Option<Instant>,
    reports: VecDeque<ActivityReport>,
}

impl ActivityReporter {
    pub fn new(repeat_interval: Duration) -> Self {
        Self { repeat_interval, ..Self::default() }
    }

    pub fn handle(&mut self, event: Event, now: Instant) {
        match event {
            Event::Connected => self.on_connected(now),
            Event::Disconnected => {
                self.connected = false;
                (self.duplicate_at, self.busy_sent) = (None, false);
                self.reports.clear();
            }
            Event::Ready => {
                if !self.ready && self.connected {
                    self.send(ActivityReport::Ready, now);
                }
                self.ready = true;
            }
            Event::ClaimsReceived => {
                self.pending = true;
                // It may have started and ended since the last event.
                self.idle_since = (self.claims_held == 0).then_some(now);
            }
            Event::ClaimsHeld(held) => {
                self.idle_since = if held > 0 { None } else { self.idle_since.or(Some(now)) };
                self.claims_held = held;
            }
            Event::Tick => {}
        }
        self.on_time(now);
    }

    pub fn next_report(&mut self) -> Option<ActivityReport> {
        self.reports.pop_front()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.connected {
            return None;
        }
        let pending = self.pending.then(|| self.next_report_allowed_at().unwrap_or(Instant::ORIGIN));
        [pending, self.duplicate_at, self.repeat_at(), self.ready_at()].into_iter().flatten().min()
    }

    /// No event leads to a report before this time, so none needs to be sent earlier.
    pub fn next_report_allowed_at(&self) -> Option<Instant> {
        self.last_sent_at.map(|last| last.plus(REPORT_INTERVAL_MIN))
    }

    fn on_connected(&mut self, now: Instant) {
        self.connected = true;
        // A restarted broker may have a controller without state.
        if !self.started_sent || !self.ready {
            self.send(ActivityReport::Started, now);
            self.started_sent = true;
        }
        if self.ready {
            self.send(ActivityReport::Ready, now);
        }
        self.pending |= self.claims_held > 0;
    }

    fn on_time(&mut self, now: Instant) {
        if !self.connected {
            return;
        }
        if self.repeat_at().is_some_and(|at| now >= at) {
            if self.ready {
                self.pending = true;
            } else {
                self.send(ActivityReport::Started, now);
            }
        }
        let rested = self.next_report_allowed_at().is_none_or(|at| now >= at);
        if self.pending && rested {
            self.pending = false;
            self.send(ActivityReport::RequestReceived, now);
            self.duplicate_at = Some(now.plus(REPORT_INTERVAL_MIN));
        } else if self.duplicate_at.is_some_and(|at| now >= at) {
            self.send(ActivityReport::RequestReceived, now);
            self.duplicate_at = None;
        } else if self.ready_at().is_some_and(|at| now >= at) {
            self.send(ActivityReport::Ready, now);
        }
    }

    fn ready_at(&self) -> Option<Instant> {
        let told = self.busy_sent && self.ready && !self.pending && self.duplicate_at.is_none();
        self.idle_since.filter(|_| told).map(|idle| idle.plus(IDLE_BEFORE_READY))
    }

    /// Idle workers send nothing, so that the controller stops them.
    fn repeat_at(&self) -> Option<Instant> {
        let speaks = self.claims_held > 0 || !self.ready;
        self.last_sent_at.filter(|_| speaks).map(|last| last.plus(self.repeat_interval))
    }

    fn send(&mut self, report: ActivityReport, now: Instant) {
        self.busy_sent = report == ActivityReport::RequestReceived;
        self.reports.push_back(report);
        self.last_sent_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const REPEAT: Duration = Duration::from_secs(60);

    struct Told {
        machine: ActivityReporter,
        reports: Vec<(u64, ActivityReport)>,
    }

    fn at(millis: u64) -> Instant {
        Instant::at(Duration::from_millis(millis))
    }

    impl Told {
        fn ready() -> Self {
            let mut told = Self::new();
            told.happens(Event::Connected, 0);
            told.happens(Event::Ready, 0);
            told
        }

        fn new() -> Self {
            Self { machine: ActivityReporter::new(REPEAT), reports: Vec::new() }
        }

        fn happens(&mut self, event: Event, millis: u64) {
            self.machine.handle(event, at(millis));
            while let Some(report) = self.machine.next_report() {
                self.reports.push((millis, report));
            }
        }

        fn passes(&mut self, until: u64) {
            while let Some(due) = self.machine.next_deadline().filter(|due| *due <= at(until)) {
                let millis = u64::try_from(due.since_origin().as_millis()).unwrap_or(u64::MAX);
                self.happens(Event::Tick, millis);
            }
        }

        fn received(&self) -> Vec<u64> {
            self.reports
                .iter()
                .filter(|(_, report)| *report == ActivityReport::RequestReceived)
                .map(|(at, _)| *at)
                .collect()
        }
    }

    #[test]
    fn started_comes_first_then_ready_then_requests_in_pairs() {
        let mut told = Told::ready();
        told.happens(Event::ClaimsReceived, 10_000);
        told.passes(60_000);
        let names: Vec<_> = told.reports.iter().map(|(at, report)| (*at, report.as_str())).collect();
        let then = [(10_000, "request-received"), (10_500, "request-received"), (12_000, "ready")];
        assert_eq!(names, [&[(0, "started"), (0, "ready")], &then[..]].concat());
    }

    #[test]
    fn one_that_holds_nothing_any_more_is_ready_again_once_and_not_before() {
        let mut told = Told::ready();
        told.happens(Event::ClaimsHeld(2), 10_000);
        told.happens(Event::ClaimsReceived, 10_000);
        told.happens(Event::ClaimsHeld(1), 20_000);
        told.passes(30_000);
        told.happens(Event::ClaimsHeld(0), 30_000);
        told.passes(31_999);
        // The next one comes just before it would be sent.
        told.happens(Event::ClaimsHeld(1), 31_999);
        told.happens(Event::ClaimsReceived, 31_999);
        told.happens(Event::ClaimsHeld(0), 32_600);
        told.passes(600_000);
        let ready = told.reports.iter().filter(|(_, report)| *report == ActivityReport::Ready).map(|(at, _)| *at);
        assert_eq!(ready.collect::<Vec<_>>(), [0, 34_600]);
    }

    #[test]
    fn a_slow_trickle_is_reported_each_time_in_company() {
        let mut told = Told::ready();
        for second in 1..=10 {
            told.happens(Event::ClaimsReceived, second * 2_000);
            told.passes(second * 2_000 + 1_999);
        }
        let received = told.received();
        assert_eq!(received.len(), 20);
        // Each pair is at most a second apart, so a controller that needs pairs heeds every request.
        assert!(received.chunks(2).all(|pair| pair[1] - pair[0] <= 1_000), "{received:?}");
    }

    #[test]
    fn a_flood_costs_two_reports_a_second_and_no_more() {
        let mut told = Told::ready();
        for millis in 1_000..11_000 {
            told.happens(Event::ClaimsReceived, millis);
        }
        told.passes(20_000);
        let received = told.received();
        assert!((20..=22).contains(&received.len()), "{}", received.len());
        assert!(received.windows(2).all(|two| two[1] - two[0] >= 500), "{received:?}");
    }

    #[test]
    fn a_long_task_is_reported_for_as_long_as_it_goes_on_and_an_idle_worker_is_silent() {
        let mut told = Told::ready();
        told.happens(Event::ClaimsHeld(1), 1_000);
        told.happens(Event::ClaimsReceived, 1_000);
        told.passes(601_000);
        let while_held = told.received().len();
        assert!((18..=22).contains(&while_held), "a pair a minute: {while_held}");
        told.happens(Event::ClaimsHeld(0), 601_000);
        told.passes(3_600_000);
        assert!(told.received().len() <= while_held + 2, "nothing but the company of the last one");
    }

    #[test]
    fn loading_is_reported_too() {
        let mut told = Told::new();
        told.happens(Event::Connected, 0);
        told.passes(150_000);
        told.happens(Event::Ready, 150_000);
        let names: Vec<_> = told.reports.iter().map(|(_, report)| report.as_str()).collect();
        assert_eq!(names, ["started", "started", "started", "ready"]);
    }

    #[test]
    fn reports_resume_when_the_broker_is_back_and_none_piles_up() {
        let mut told = Told::ready();
        told.happens(Event::Disconnected, 5_000);
        for second in 6..600 {
            told.happens(Event::ClaimsReceived, second * 1_000);
        }
        told.happens(Event::ClaimsHeld(1), 600_000);
        assert!(told.received().is_empty() && told.machine.next_deadline().is_none());
        told.happens(Event::Connected, 700_000);
        told.passes(702_000);
        let after: Vec<_> =
            told.reports.iter().filter(|(at, _)| *at >= 700_000).map(|(_, report)| report.as_str()).collect();
        assert_eq!(after, ["ready", "request-received", "request-received"]);
    }
}
