//! What the answers of metadata services mean, and when they are asked again.

use std::time::Duration;

use journeyman::domain::notice::azure::{Azure, Kind, Patience, Scheduled};
use journeyman::domain::notice::file::{Content, NoticeFile};
use journeyman::domain::notice::gcp::{self, Value};
use journeyman::domain::notice::{
    Answer, Goes, NOTICE_LEAST, News, Next, PROBE_AGAIN, Pace, Probed, Provider, Search, TROUBLE, Watch, aws, azure,
};
use journeyman::domain::time::Instant;

use crate::support::{at, secs};

const FIVE: Pace = Pace::every(Duration::from_secs(5));
const ONE: Pace = Pace::every(Duration::from_secs(1));

fn goes(seconds: u64) -> Answer {
    Answer::Goes(Goes::At(at(seconds)))
}

fn said(seconds: u64) -> Option<News> {
    Some(News::Goes(Goes::At(at(seconds))))
}

#[test]
fn a_notice_is_news_once_however_often_it_is_read() {
    let mut watch = Watch::new(FIVE, 1);
    assert_eq!(watch.answered(goes(120), at(0), at(0)), said(120));
    assert_eq!(watch.due(), at(5));
    // The remaining time is read with the second's grain of the service's clock.
    for (now, again) in [(5, 120), (10, 121), (15, 119)] {
        assert_eq!(watch.answered(goes(again), at(now), at(now)), None);
    }
}

#[test]
fn an_earlier_time_is_news_and_a_later_one_is_not() {
    let mut watch = Watch::new(FIVE, 1);
    assert_eq!(watch.answered(goes(120), at(0), at(0)), said(120));
    assert_eq!(watch.answered(goes(300), at(5), at(5)), None);
    assert_eq!(watch.answered(goes(60), at(10), at(10)), said(60));
    assert_eq!(watch.answered(goes(120), at(15), at(15)), None);
}

#[test]
fn a_withdrawn_notice_is_told_of_once_and_its_return_changes_nothing() {
    let mut watch = Watch::new(FIVE, 1);
    watch.answered(goes(120), at(0), at(0));
    assert_eq!(watch.answered(Answer::Nothing, at(5), at(5)), Some(News::Withdrawn));
    assert_eq!(watch.answered(Answer::Nothing, at(10), at(10)), None);
    assert_eq!(watch.answered(goes(120), at(15), at(15)), None);
}

#[test]
fn a_time_that_is_past_leaves_the_least_that_a_report_takes() {
    let mut watch = Watch::new(FIVE, 1);
    let news = watch.answered(goes(10), at(100), at(100));
    assert_eq!(news, Some(News::Goes(Goes::At(at(100).plus(NOTICE_LEAST)))));
    assert_eq!(watch.answered(goes(10), at(105), at(105)), None, "and it does not move on with the time");
}

#[test]
fn a_notice_without_a_time_may_be_followed_by_one_with() {
    let mut watch = Watch::new(FIVE, 1);
    assert_eq!(watch.answered(Answer::Goes(Goes::Soon), at(0), at(0)), Some(News::Goes(Goes::Soon)));
    assert_eq!(watch.answered(Answer::Goes(Goes::Soon), at(5), at(5)), None);
    assert_eq!(watch.answered(goes(60), at(10), at(10)), said(60));
}

#[test]
fn without_an_answer_it_is_asked_again_soon_and_said_once_and_taken_back_once() {
    let mut watch = Watch::new(FIVE, 1);
    let mut now = at(0);
    let mut news = Vec::new();
    for _ in 0..20 {
        news.extend(watch.answered(Answer::Trouble, now, now));
        let wait = watch.due().since(now);
        assert!(wait >= TROUBLE.first / 2 && wait <= TROUBLE.max, "{wait:?}");
        now = watch.due();
    }
    assert_eq!(news, [News::Unwell]);
    assert_eq!(watch.answered(Answer::Nothing, now, now), Some(News::Well));
    assert_eq!(watch.answered(Answer::Nothing, now, now), None);
}

#[test]
fn an_answer_that_takes_longer_than_the_pace_is_not_followed_by_a_burst() {
    let mut watch = Watch::new(FIVE, 1);
    watch.answered(Answer::Nothing, at(0), at(17));
    assert_eq!(watch.due(), at(17));
    watch.answered(Answer::Nothing, at(17), at(18));
    assert_eq!(watch.due(), at(22));
}

#[test]
fn ec2_is_asked_for_a_token_then_for_both_signs_and_rests_five_seconds() {
    let mut watch = aws::Aws::new(FIVE, 1);
    assert_eq!(watch.next(at(0)), Next::Call(aws::Call::Token));
    assert_eq!(watch.token(Some(secs(21_600)), at(0), at(0)), None);
    let nothing = aws::Reply::Answer(Answer::Nothing);
    for now in [0, 5, 10] {
        assert_eq!(watch.next(at(now)), Next::Call(aws::Call::Action));
        assert_eq!(watch.answered(aws::Call::Action, nothing, at(now), at(now)), None);
        assert_eq!(watch.next(at(now)), Next::Call(aws::Call::Rebalance));
        assert_eq!(watch.answered(aws::Call::Rebalance, nothing, at(now), at(now)), None);
        assert_eq!(watch.next(at(now)), Next::Rest(at(now + 5)));
    }
}

#[test]
fn an_ec2_token_is_renewed_before_its_end() {
    let mut watch = aws::Aws::new(FIVE, 1);
    watch.token(Some(secs(100)), at(0), at(0));
    assert_eq!(watch.next(at(89)), Next::Call(aws::Call::Action));
    assert_eq!(watch.next(at(90)), Next::Call(aws::Call::Token));
}

#[test]
fn an_ec2_token_that_is_no_longer_accepted_is_replaced_at_once_and_a_new_one_that_is_not_is_trouble() {
    let mut watch = aws::Aws::new(FIVE, 1);
    watch.token(Some(secs(21_600)), at(0), at(0));
    watch.answered(aws::Call::Action, aws::Reply::Answer(Answer::Nothing), at(0), at(0));
    assert_eq!(watch.answered(aws::Call::Rebalance, aws::Reply::Unauthorized, at(0), at(0)), None);
    assert_eq!(watch.next(at(0)), Next::Call(aws::Call::Token), "the question is still open");
    watch.token(Some(secs(21_600)), at(0), at(0));
    assert_eq!(watch.next(at(0)), Next::Call(aws::Call::Rebalance));
    watch.answered(aws::Call::Rebalance, aws::Reply::Unauthorized, at(0), at(0));
    assert!(matches!(watch.next(at(0)), Next::Rest(_)), "no busy loop: {:?}", watch.next(at(0)));
}

#[test]
fn an_ec2_service_that_gives_no_token_is_asked_again_with_pauses_and_said_to_be_unwell() {
    let mut watch = aws::Aws::new(FIVE, 1);
    let (mut now, mut asked, mut news) = (at(0), 0, Vec::new());
    while asked < 10 {
        match watch.next(now) {
            Next::Rest(until) => now = until,
            Next::Call(call) => {
                assert_eq!(call, aws::Call::Token);
                asked += 1;
                news.extend(watch.token(None, now, now));
            }
        }
    }
    assert_eq!(news, [News::Unwell]);
    assert!(now >= at(20), "{now:?}");
    // A token that has no life is none.
    assert_eq!(watch.token(Some(Duration::ZERO), now, now), None);
    assert!(matches!(watch.next(now), Next::Rest(_)));
}

#[test]
fn a_service_that_was_unwell_is_well_when_it_says_whether_there_is_a_notice_and_not_before() {
    let mut watch = aws::Aws::new(FIVE, 1);
    let news: Vec<_> = (0..3).filter_map(|n| watch.token(None, at(n), at(n))).collect();
    assert_eq!(news, [News::Unwell]);
    assert_eq!(watch.token(Some(secs(60)), at(4), at(4)), None);
    assert_eq!(watch.answered(aws::Call::Rebalance, aws::Reply::Answer(Answer::Nothing), at(4), at(4)), None);
    assert_eq!(watch.answered(aws::Call::Action, aws::Reply::Answer(Answer::Trouble), at(4), at(4)), None);
    let nothing = aws::Reply::Answer(Answer::Nothing);
    assert_eq!(watch.answered(aws::Call::Action, nothing, at(5), at(5)), Some(News::Well));
    assert_eq!(watch.answered(aws::Call::Action, nothing, at(10), at(10)), None);

    let mut azure = Azure::new(ONE, 1);
    let news: Vec<_> = (0..3).filter_map(|n| azure.named(None, at(n), at(n))).collect();
    assert_eq!(news, [News::Unwell]);
    assert_eq!(azure.named(Some("vm_1"), at(4), at(4)), None);
    assert_eq!(azure.listed(None, at(4), at(4)), None);
    assert_eq!(azure.listed(Some(&[]), at(5), at(5)), Some(News::Well));
}

#[test]
fn googles_value_is_read_first_and_then_waited_for() {
    let mut value = Value::new(ONE, gcp::PREEMPTED, 1);
    assert_eq!(value.next(at(0)), Next::Call(gcp::Call::Read));
    assert_eq!(value.answered(gcp::Call::Read, gcp::Reply::Stays, at(0), at(0)), None);
    assert_eq!(
        value.next(at(0)),
        Next::Rest(at(1)),
        "a service that answers every wait at once is not asked in a loop"
    );
    assert_eq!(value.next(at(1)), Next::Call(gcp::Call::WaitForChange));
    let news = value.answered(gcp::Call::WaitForChange, gcp::Reply::Goes, at(1), at(20));
    assert_eq!(news, said(50), "thirty seconds from the answer, not from the question");
}

#[test]
fn google_is_read_again_after_trouble_and_the_notice_counts_from_when_the_vm_was_known_to_stay() {
    let mut value = Value::new(ONE, gcp::PREEMPTED, 1);
    value.answered(gcp::Call::Read, gcp::Reply::Stays, at(0), at(0));
    value.answered(gcp::Call::WaitForChange, gcp::Reply::Trouble, at(1), at(10));
    let Next::Rest(until) = value.next(at(10)) else { panic!("it rests after trouble") };
    assert_eq!(value.next(until), Next::Call(gcp::Call::Read));
    assert_eq!(value.answered(gcp::Call::Read, gcp::Reply::Goes, until, until), said(30));
}

#[test]
fn a_preemption_that_was_under_way_before_the_first_look_leaves_no_time_that_is_known() {
    let mut value = Value::new(ONE, gcp::PREEMPTED, 1);
    let news = value.answered(gcp::Call::Read, gcp::Reply::Goes, at(0), at(0));
    assert_eq!(news, Some(News::Goes(Goes::Soon)));
}

fn event(kind: Kind, resources: &[&str], goes: Goes) -> Scheduled {
    Scheduled { kind, resources: resources.iter().copied().map(Box::from).collect(), goes }
}

fn named(name: &str) -> Azure {
    let mut azure = Azure::new(ONE, 1);
    assert_eq!(azure.next(at(0)), Next::Call(azure::Call::Name));
    assert_eq!(azure.named(Some(name), at(0), at(0)), None);
    azure
}

#[test]
fn azures_events_are_asked_for_with_patience_until_they_have_come_once() {
    let mut azure = named("vm_1");
    assert_eq!(azure.next(at(0)), Next::Call(azure::Call::Events(Patience::Long)));
    azure.listed(None, at(0), at(130));
    let Next::Rest(until) = azure.next(at(130)) else { panic!("it rests after trouble") };
    assert_eq!(azure.next(until), Next::Call(azure::Call::Events(Patience::Long)));
    azure.listed(Some(&[]), until, until);
    assert_eq!(azure.next(until), Next::Rest(until.plus(secs(1))));
    assert_eq!(azure.next(until.plus(secs(1))), Next::Call(azure::Call::Events(Patience::Usual)));
}

#[test]
fn an_azure_vm_without_a_name_asks_for_it_again_and_hears_of_no_events() {
    let mut azure = Azure::new(ONE, 1);
    for name in [None, Some("")] {
        azure.named(name, at(0), at(0));
        let Next::Rest(until) = azure.next(at(0)) else { panic!("it rests after trouble") };
        assert_eq!(azure.next(until), Next::Call(azure::Call::Name));
    }
}

#[test]
fn only_events_that_end_this_vm_are_meant_for_it() {
    let mut azure = named("vm_1");
    let at_60 = Goes::At(at(60));
    let others = [
        event(Kind::Ends, &["vm_10", "vm_2"], at_60),
        event(Kind::Freezes, &["vm_1"], at_60),
        event(Kind::Other, &["vm_1"], at_60),
        event(Kind::Ends, &[], at_60),
    ];
    assert_eq!(azure.listed(Some(&others), at(0), at(0)), None);
    let ours = [event(Kind::Ends, &["vm_2", "VM_1"], at_60)];
    assert_eq!(azure.listed(Some(&ours), at(1), at(1)), said(60));
}

#[test]
fn of_several_events_the_earliest_counts_and_one_that_has_begun_before_all() {
    let mut azure = named("vm_1");
    let ours = |goes| event(Kind::Ends, &["vm_1"], goes);
    let two = [ours(Goes::At(at(900))), ours(Goes::At(at(60)))];
    assert_eq!(azure.listed(Some(&two), at(0), at(0)), said(60));
    let begun = [ours(Goes::At(at(60))), ours(Goes::Soon)];
    assert_eq!(azure.listed(Some(&begun), at(1), at(1)), Some(News::Goes(Goes::Soon)));
}

#[test]
fn a_notice_file_says_when_or_at_once_and_nothing_while_it_is_missing() {
    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.read(Content::Missing, at(0), at(0)), None);
    assert_eq!(file.due(), at(1));
    assert_eq!(file.read(Content::Time(at(90)), at(1), at(1)), said(90));
    assert_eq!(file.read(Content::Time(at(90)), at(2), at(2)), None);
    assert_eq!(file.read(Content::Empty, at(3), at(3)), Some(News::Goes(Goes::Soon)));
    assert_eq!(file.read(Content::Missing, at(4), at(4)), Some(News::Withdrawn));
}

#[test]
fn half_a_time_in_a_notice_file_is_looked_at_again_and_what_stays_odd_is_an_order_to_go() {
    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.read(Content::Odd, at(0), at(0)), None);
    assert!(file.due() <= at(1));
    assert_eq!(file.read(Content::Time(at(90)), at(1), at(1)), said(90));

    let mut file = NoticeFile::new(ONE, 1);
    assert_eq!(file.read(Content::Odd, at(0), at(0)), None);
    assert_eq!(file.read(Content::Odd, at(1), at(1)), Some(News::Goes(Goes::Soon)));
}

#[test]
fn a_notice_file_that_cannot_be_read_is_said_and_orders_nothing() {
    let mut file = NoticeFile::new(ONE, 1);
    let news: Vec<_> = (0..9).filter_map(|n| file.read(Content::Unreadable, at(n), at(n))).collect();
    assert_eq!(news, [News::Unwell]);
}

#[test]
fn a_host_is_searched_for_a_cloud_four_times_and_then_no_more() {
    let mut search = Search::default();
    for wait in PROBE_AGAIN {
        assert_eq!(search.probed(&[]), Probed::Again(wait));
    }
    assert_eq!(search.probed(&[]), Probed::NoCloud);
}

#[test]
fn a_service_that_proves_who_it_is_comes_before_one_that_others_imitate() {
    let found = |there: &[Provider]| Search::default().probed(there);
    assert_eq!(found(&[Provider::Aws]), Probed::Found(Provider::Aws));
    assert_eq!(found(&[Provider::Aws, Provider::Gcp]), Probed::Found(Provider::Gcp));
    assert_eq!(found(&[Provider::Aws, Provider::Azure]), Probed::Found(Provider::Azure));
}

#[test]
fn no_watch_is_ever_due_in_the_past_of_its_answer() {
    let mut watch = Watch::new(FIVE, 7);
    for (sent_at, now) in [(0, 0), (5, 9), (9, 30)] {
        for answer in [Answer::Nothing, Answer::Trouble, Answer::AtRisk, goes(1)] {
            watch.answered(answer, at(sent_at), at(now));
            assert!(watch.due() >= at(now), "{answer:?}");
        }
    }
    assert_ne!(watch.due(), Instant::ORIGIN);
}
