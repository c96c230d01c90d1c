//! How replies of metadata services are interpreted, and when the next request is sent.

use std::time::Duration;

use journeyman::domain::termination_notice::azure::{AzureTimeout, AzureTracker, VmEvent, VmEventKind};
use journeyman::domain::termination_notice::gcp::{self, GcpTracker};
use journeyman::domain::termination_notice::notice_file::{NoticeFile, NoticeFileContent};
use journeyman::domain::termination_notice::{
    NOTICE_MIN, NOTICE_RETRY, NextRequest, NoticeEvent, NoticeOrigin, NoticeReading, NoticeTracker, PROBE_DELAYS,
    PollSchedule, ProviderProbe, ProviderSearch, Termination, aws, azure,
};
use journeyman::domain::time::Instant;

use crate::support::{at, secs};

const FIVE: PollSchedule = PollSchedule::with_interval(Duration::from_secs(5));
const ONE: PollSchedule = PollSchedule::with_interval(Duration::from_secs(1));

fn goes(seconds: u64) -> NoticeReading {
    NoticeReading::Terminating(Termination::At(at(seconds)))
}

fn said(seconds: u64) -> Option<NoticeEvent> {
    Some(NoticeEvent::Terminating(Termination::At(at(seconds))))
}

#[test]
fn a_notice_is_news_once_however_often_it_is_read() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    assert_eq!(watch.on_reading(goes(120), at(0), at(0)), said(120));
    assert_eq!(watch.next_at(), at(5));
    // The remaining time is read with the second's grain of the service's clock.
    for (now, again) in [(5, 120), (10, 121), (15, 119)] {
        assert_eq!(watch.on_reading(goes(again), at(now), at(now)), None);
    }
}

#[test]
fn an_earlier_time_is_news_and_a_later_one_is_not() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    assert_eq!(watch.on_reading(goes(120), at(0), at(0)), said(120));
    assert_eq!(watch.on_reading(goes(300), at(5), at(5)), None);
    assert_eq!(watch.on_reading(goes(60), at(10), at(10)), said(60));
    assert_eq!(watch.on_reading(goes(120), at(15), at(15)), None);
}

#[test]
fn a_withdrawn_notice_is_told_of_once_and_its_return_changes_nothing() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    watch.on_reading(goes(120), at(0), at(0));
    assert_eq!(watch.on_reading(NoticeReading::Nothing, at(5), at(5)), Some(NoticeEvent::Withdrawn));
    assert_eq!(watch.on_reading(NoticeReading::Nothing, at(10), at(10)), None);
    assert_eq!(watch.on_reading(goes(120), at(15), at(15)), None);
}

#[test]
fn a_time_that_is_past_leaves_the_least_that_a_report_takes() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    let news = watch.on_reading(goes(10), at(100), at(100));
    assert_eq!(news, Some(NoticeEvent::Terminating(Termination::At(at(100).plus(NOTICE_MIN)))));
    assert_eq!(watch.on_reading(goes(10), at(105), at(105)), None, "and it does not move on with the time");
}

#[test]
fn a_notice_without_a_time_may_be_followed_by_one_with() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    assert_eq!(
        watch.on_reading(NoticeReading::Terminating(Termination::Soon), at(0), at(0)),
        Some(NoticeEvent::Terminating(Termination::Soon))
    );
    assert_eq!(watch.on_reading(NoticeReading::Terminating(Termination::Soon), at(5), at(5)), None);
    assert_eq!(watch.on_reading(goes(60), at(10), at(10)), said(60));
}

#[test]
fn without_an_answer_it_is_asked_again_soon_and_said_once_and_taken_back_once() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    let mut now = at(0);
    let mut news = Vec::new();
    for _ in 0..20 {
        news.extend(watch.on_reading(NoticeReading::Unavailable, now, now));
        let wait = watch.next_at().since(now);
        assert!(wait >= NOTICE_RETRY.first / 2 && wait <= NOTICE_RETRY.max, "{wait:?}");
        now = watch.next_at();
    }
    assert_eq!(news, [NoticeEvent::WatchFailing]);
    assert_eq!(watch.on_reading(NoticeReading::Nothing, now, now), Some(NoticeEvent::WatchRecovered));
    assert_eq!(watch.on_reading(NoticeReading::Nothing, now, now), None);
}

#[test]
fn an_answer_that_takes_longer_than_the_pace_is_not_followed_by_a_burst() {
    let mut watch = NoticeTracker::new(FIVE, 1);
    watch.on_reading(NoticeReading::Nothing, at(0), at(17));
    assert_eq!(watch.next_at(), at(17));
    watch.on_reading(NoticeReading::Nothing, at(17), at(18));
    assert_eq!(watch.next_at(), at(22));
}

#[test]
fn ec2_is_asked_for_a_token_and_then_for_the_action_every_five_seconds() {
    let mut watch = aws::AwsTracker::new(FIVE, 1);
    assert_eq!(watch.next_request(at(0)), NextRequest::Call(aws::AwsRequest::Token));
    assert_eq!(watch.on_token(Some(secs(21_600)), at(0), at(0)), None);
    let nothing = aws::AwsReply::Reading(NoticeReading::Nothing);
    for now in [0, 5, 10] {
        assert_eq!(watch.next_request(at(now)), NextRequest::Call(aws::AwsRequest::InstanceAction));
        assert_eq!(watch.on_reply(nothing, at(now), at(now)), None);
        assert_eq!(watch.next_request(at(now)), NextRequest::WaitUntil(at(now + 5)));
    }
}

#[test]
fn an_ec2_token_is_renewed_before_its_end() {
    let mut watch = aws::AwsTracker::new(FIVE, 1);
    watch.on_token(Some(secs(100)), at(0), at(0));
    assert_eq!(watch.next_request(at(89)), NextRequest::Call(aws::AwsRequest::InstanceAction));
    assert_eq!(watch.next_request(at(90)), NextRequest::Call(aws::AwsRequest::Token));
}

#[test]
fn an_ec2_token_that_is_no_longer_accepted_is_replaced_at_once_and_a_new_one_that_is_not_is_trouble() {
    let mut watch = aws::AwsTracker::new(FIVE, 1);
    watch.on_token(Some(secs(21_600)), at(0), at(0));
    watch.on_reply(aws::AwsReply::Reading(NoticeReading::Nothing), at(0), at(0));
    assert_eq!(watch.on_reply(aws::AwsReply::Unauthorized, at(5), at(5)), None);
    assert_eq!(watch.next_request(at(5)), NextRequest::Call(aws::AwsRequest::Token), "the request is still due");
    watch.on_token(Some(secs(21_600)), at(5), at(5));
    assert_eq!(watch.next_request(at(5)), NextRequest::Call(aws::AwsRequest::InstanceAction));
    watch.on_reply(aws::AwsReply::Unauthorized, at(5), at(5));
    assert!(
        matches!(watch.next_request(at(5)), NextRequest::WaitUntil(_)),
        "no busy loop: {:?}",
        watch.next_request(at(5))
    );
}

#[test]
fn an_ec2_service_that_gives_no_token_is_asked_again_with_pauses_and_said_to_be_unwell() {
    let mut watch = aws::AwsTracker::new(FIVE, 1);
    let (mut now, mut asked, mut news) = (at(0), 0, Vec::new());
    while asked < 10 {
        match watch.next_request(now) {
            NextRequest::WaitUntil(until) => now = until,
            NextRequest::Call(call) => {
                assert_eq!(call, aws::AwsRequest::Token);
                asked += 1;
                news.extend(watch.on_token(None, now, now));
            }
        }
    }
    assert_eq!(news, [NoticeEvent::WatchFailing]);
    assert!(now >= at(20), "{now:?}");
    // A token that has no life is none.
    assert_eq!(watch.on_token(Some(Duration::ZERO), now, now), None);
    assert!(matches!(watch.next_request(now), NextRequest::WaitUntil(_)));
}

#[test]
fn a_service_that_was_unwell_is_well_when_it_says_whether_there_is_a_notice_and_not_before() {
    let mut watch = aws::AwsTracker::new(FIVE, 1);
    let news: Vec<_> = (0..3).filter_map(|n| watch.on_token(None, at(n), at(n))).collect();
    assert_eq!(news, [NoticeEvent::WatchFailing]);
    assert_eq!(watch.on_token(Some(secs(60)), at(4), at(4)), None);
    assert_eq!(watch.on_reply(aws::AwsReply::Reading(NoticeReading::Unavailable), at(4), at(4)), None);
    let nothing = aws::AwsReply::Reading(NoticeReading::Nothing);
    assert_eq!(watch.on_reply(nothing, at(5), at(5)), Some(NoticeEvent::WatchRecovered));
    assert_eq!(watch.on_reply(nothing, at(10), at(10)), None);

    let mut azure = AzureTracker::new(ONE, 1);
    let news: Vec<_> = (0..3).filter_map(|n| azure.on_name(None, at(n), at(n))).collect();
    assert_eq!(news, [NoticeEvent::WatchFailing]);
    assert_eq!(azure.on_name(Some("vm_1"), at(4), at(4)), None);
    assert_eq!(azure.on_events(None, at(4), at(4)), None);
    assert_eq!(azure.on_events(Some(&[]), at(5), at(5)), Some(NoticeEvent::WatchRecovered));
}

#[test]
fn googles_value_is_read_first_and_then_waited_for() {
    let mut value = GcpTracker::new(ONE, gcp::PREEMPTION_NOTICE, 1);
    assert_eq!(value.next_request(at(0)), NextRequest::Call(gcp::GcpRequest::Read));
    assert_eq!(value.on_reply(gcp::GcpRequest::Read, gcp::GcpReply::Staying, at(0), at(0)), None);
    assert_eq!(
        value.next_request(at(0)),
        NextRequest::WaitUntil(at(1)),
        "a service that answers every wait at once is not asked in a loop"
    );
    assert_eq!(value.next_request(at(1)), NextRequest::Call(gcp::GcpRequest::WaitForChange));
    let news = value.on_reply(gcp::GcpRequest::WaitForChange, gcp::GcpReply::Terminating, at(1), at(20));
    assert_eq!(news, said(50), "thirty seconds from the answer, not from the question");
}

#[test]
fn google_is_read_again_after_trouble_and_the_notice_counts_from_when_the_vm_was_known_to_stay() {
    let mut value = GcpTracker::new(ONE, gcp::PREEMPTION_NOTICE, 1);
    value.on_reply(gcp::GcpRequest::Read, gcp::GcpReply::Staying, at(0), at(0));
    value.on_reply(gcp::GcpRequest::WaitForChange, gcp::GcpReply::Unavailable, at(1), at(10));
    let NextRequest::WaitUntil(until) = value.next_request(at(10)) else { panic!("it rests after trouble") };
    assert_eq!(value.next_request(until), NextRequest::Call(gcp::GcpRequest::Read));
    assert_eq!(value.on_reply(gcp::GcpRequest::Read, gcp::GcpReply::Terminating, until, until), said(30));
}

#[test]
fn a_preemption_that_was_under_way_before_the_first_look_leaves_no_time_that_is_known() {
    let mut value = GcpTracker::new(ONE, gcp::PREEMPTION_NOTICE, 1);
    let news = value.on_reply(gcp::GcpRequest::Read, gcp::GcpReply::Terminating, at(0), at(0));
    assert_eq!(news, Some(NoticeEvent::Terminating(Termination::Soon)));
}

fn event(kind: VmEventKind, resources: &[&str], goes: Termination) -> VmEvent {
    VmEvent { kind, resources: resources.iter().copied().map(Box::from).collect(), termination: goes }
}

fn named(name: &str) -> AzureTracker {
    let mut azure = AzureTracker::new(ONE, 1);
    assert_eq!(azure.next_request(at(0)), NextRequest::Call(azure::AzureRequest::Name));
    assert_eq!(azure.on_name(Some(name), at(0), at(0)), None);
    azure
}

#[test]
fn azures_events_are_asked_for_with_patience_until_they_have_come_once() {
    let mut azure = named("vm_1");
    assert_eq!(azure.next_request(at(0)), NextRequest::Call(azure::AzureRequest::Events(AzureTimeout::FirstReply)));
    azure.on_events(None, at(0), at(130));
    let NextRequest::WaitUntil(until) = azure.next_request(at(130)) else { panic!("it rests after trouble") };
    assert_eq!(azure.next_request(until), NextRequest::Call(azure::AzureRequest::Events(AzureTimeout::FirstReply)));
    azure.on_events(Some(&[]), until, until);
    assert_eq!(azure.next_request(until), NextRequest::WaitUntil(until.plus(secs(1))));
    assert_eq!(
        azure.next_request(until.plus(secs(1))),
        NextRequest::Call(azure::AzureRequest::Events(AzureTimeout::Default))
    );
}

#[test]
fn an_azure_vm_without_a_name_asks_for_it_again_and_hears_of_no_events() {
    let mut azure = AzureTracker::new(ONE, 1);
    for name in [None, Some("")] {
        azure.on_name(name, at(0), at(0));
        let NextRequest::WaitUntil(until) = azure.next_request(at(0)) else { panic!("it rests after trouble") };
        assert_eq!(azure.next_request(until), NextRequest::Call(azure::AzureRequest::Name));
    }
}

#[test]
fn only_events_that_end_this_vm_are_meant_for_it() {
    let mut azure = named("vm_1");
    let at_60 = Termination::At(at(60));
    let others = [
        event(VmEventKind::Terminates, &["vm_10", "vm_2"], at_60),
        event(VmEventKind::Freezes, &["vm_1"], at_60),
        event(VmEventKind::Other, &["vm_1"], at_60),
        event(VmEventKind::Terminates, &[], at_60),
    ];
    assert_eq!(azure.on_events(Some(&others), at(0), at(0)), None);
    let ours = [event(VmEventKind::Terminates, &["vm_2", "VM_1"], at_60)];
    assert_eq!(azure.on_events(Some(&ours), at(1), at(1)), said(60));
}

#[test]
fn of_several_events_the_earliest_counts_and_one_that_has_begun_before_all() {
    let mut azure = named("vm_1");
    let ours = |goes| event(VmEventKind::Terminates, &["vm_1"], goes);
    let two = [ours(Termination::At(at(900))), ours(Termination::At(at(60)))];
    assert_eq!(azure.on_events(Some(&two), at(0), at(0)), said(60));
    let begun = [ours(Termination::At(at(60))), ours(Termination::Soon)];
    assert_eq!(azure.on_events(Some(&begun), at(1), at(1)), Some(NoticeEvent::Terminating(Termination::Soon)));
}

#[test]
fn a_notice_file_says_when_or_at_once_and_nothing_while_it_is_missing() {
    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.on_read(NoticeFileContent::Missing, at(0), at(0)), None);
    assert_eq!(file.next_at(), at(1));
    assert_eq!(file.on_read(NoticeFileContent::Time(at(90)), at(1), at(1)), said(90));
    assert_eq!(file.on_read(NoticeFileContent::Time(at(90)), at(2), at(2)), None);
    assert_eq!(file.on_read(NoticeFileContent::Empty, at(3), at(3)), Some(NoticeEvent::Terminating(Termination::Soon)));
    assert_eq!(file.on_read(NoticeFileContent::Missing, at(4), at(4)), Some(NoticeEvent::Withdrawn));
}

#[test]
fn half_a_time_in_a_notice_file_is_looked_at_again_and_what_stays_odd_is_an_order_to_go() {
    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.on_read(NoticeFileContent::Invalid, at(0), at(0)), None);
    assert!(file.next_at() <= at(1));
    assert_eq!(file.on_read(NoticeFileContent::Time(at(90)), at(1), at(1)), said(90));

    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.on_read(NoticeFileContent::Invalid, at(0), at(0)), None);
    assert_eq!(
        file.on_read(NoticeFileContent::Invalid, at(1), at(1)),
        Some(NoticeEvent::Terminating(Termination::Soon))
    );
}

#[test]
fn a_notice_file_that_cannot_be_read_is_said_and_orders_nothing() {
    let mut file = NoticeFile::new(ONE, 1);
    let news: Vec<_> = (0..9).filter_map(|n| file.on_read(NoticeFileContent::Unreadable, at(n), at(n))).collect();
    assert_eq!(news, [NoticeEvent::WatchFailing]);
}

#[test]
fn a_host_is_searched_for_a_cloud_four_times_and_then_no_more() {
    let mut search = ProviderSearch::default();
    for wait in PROBE_DELAYS {
        assert_eq!(search.on_probed(&[]), ProviderProbe::RetryAfter(wait));
    }
    assert_eq!(search.on_probed(&[]), ProviderProbe::NotFound);
}

#[test]
fn a_service_that_proves_who_it_is_comes_before_one_that_others_imitate() {
    let found = |there: &[NoticeOrigin]| ProviderSearch::default().on_probed(there);
    assert_eq!(found(&[NoticeOrigin::Aws]), ProviderProbe::Found(NoticeOrigin::Aws));
    assert_eq!(found(&[NoticeOrigin::Aws, NoticeOrigin::Gcp]), ProviderProbe::Found(NoticeOrigin::Gcp));
    assert_eq!(found(&[NoticeOrigin::Aws, NoticeOrigin::Azure]), ProviderProbe::Found(NoticeOrigin::Azure));
}

#[test]
fn no_watch_is_ever_due_in_the_past_of_its_answer() {
    let mut watch = NoticeTracker::new(FIVE, 7);
    for (sent_at, now) in [(0, 0), (5, 9), (9, 30)] {
        for answer in [NoticeReading::Nothing, NoticeReading::Unavailable, goes(1)] {
            watch.on_reading(answer, at(sent_at), at(now));
            assert!(watch.next_at() >= at(now), "{answer:?}");
        }
    }
    assert_ne!(watch.next_at(), Instant::ORIGIN);
}
