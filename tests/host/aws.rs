//! EC2.

use journeyman_domain::termination_notice::Termination;
use journeyman_platform::host::termination_notice::{MetadataProvider, NO_ANSWER_YET, Notice, NoticeOrigin};

use crate::host::metadata_service::{Cloud as Service, Metadata, faults, server_error};
use crate::host::notice_watch::{Watched, assert_about, is_failing};
use crate::support::gremlin::Act;

const EC2: MetadataProvider = MetadataProvider::Aws;
const ACTION: &str = "spot/instance-action";

fn action(word: &str, time: impl std::fmt::Display) -> Option<String> {
    Some(format!("{{\"action\": \"{word}\", \"time\": \"{time}\"}}"))
}

#[tokio::test]
async fn an_interruption_is_reported_once_with_its_time() {
    let service = Metadata::start(Service::Ec2).await;
    let mut watched = Watched::cloud(EC2, service.url());
    service.wait_for_requests(ACTION, 2).await;
    let time = service.in_seconds(120);
    service.change(|state| state.instance_action = action("terminate", time));
    assert_about(watched.next_in_seconds().await, 120.0);
    service.wait_for_requests(ACTION, 5).await;
    watched.assert_no_more_notices();
    assert!(service.requests()[0].starts_with("PUT /latest/api/token "));
}

#[tokio::test]
async fn a_hibernation_means_at_once() {
    let service = Metadata::start(Service::Ec2).await;
    let time = service.in_seconds(120);
    service.change(|state| state.instance_action = action("hibernate", time));
    let notice = Watched::cloud(EC2, service.url()).next().await;
    assert_eq!(notice, Notice { origin: NoticeOrigin::Aws, termination: Termination::Soon });
}

#[tokio::test]
async fn the_remaining_time_is_measured_on_the_clock_of_the_service() {
    for (clock_s, word) in [(3 * 3600, "terminate"), (-3 * 3600, "stop")] {
        let service = Metadata::start(Service::Ec2).await;
        service.change(|state| state.clock_s = clock_s);
        let time = service.in_seconds(120);
        service.change(|state| state.instance_action = action(word, time));
        assert_about(Watched::cloud(EC2, service.url()).next_in_seconds().await, 120.0);
    }
}

#[tokio::test]
async fn a_service_that_rejects_its_own_tokens_is_not_polled_in_a_loop() {
    let service = Metadata::start(Service::Ec2).await;
    service.change(|state| state.accept_tokens = false);
    let mut watched = Watched::cloud(EC2, service.url());
    watched.wait_for_status(is_failing).await;
    assert!(service.requests().len() <= 8, "two requests a poll: {:?}", service.requests());
    watched.assert_no_more_notices();
}

#[tokio::test]
async fn no_fault_of_the_service_is_a_notice_or_stops_the_watch() {
    let service = Metadata::start(Service::Ec2).await;
    let mut watched = Watched::cloud(EC2, service.url());
    service.wait_for_requests(ACTION, 1).await;
    service.change(|state| state.faults.extend(faults()));
    service.wait_for_requests(ACTION, faults().len() + 2).await;
    watched.assert_no_more_notices();
    assert!(!service.requests().iter().any(|line| line.contains("elsewhere")), "no redirect is followed");
    let time = service.in_seconds(120);
    service.change(|state| state.instance_action = action("terminate", time));
    assert_about(watched.next_in_seconds().await, 120.0);
}

#[tokio::test]
async fn a_watch_is_not_healthy_before_the_first_answer() {
    let service = Metadata::start(Service::Ec2).await;
    service.change(|state| state.faults.push_back(Act::Silence));
    let mut watched = Watched::cloud(EC2, service.url());
    watched.wait_for_status(|status| status.error.as_deref() == Some(NO_ANSWER_YET)).await;
    watched.wait_for_status(|status| status.error.is_none()).await;
    watched.assert_no_more_notices();
}

#[tokio::test]
async fn a_watch_is_failing_while_the_service_does_not_answer() {
    let service = Metadata::start(Service::Ec2).await;
    let mut watched = Watched::cloud(EC2, service.url());
    let seen = watched.wait_for_status(|status| status.error.is_none()).await;
    assert_eq!(seen.provider, "aws");
    service.wait_for_requests(ACTION, 2).await;
    service.change(|state| state.faults.extend(vec![server_error(); 10_000]));
    let seen = watched.wait_for_status(is_failing).await;
    assert!(seen.error.is_some_and(|error| error.contains("500")));
    service.change(|state| state.faults.clear());
    watched.wait_for_status(|status| status.error.is_none()).await;
    watched.assert_no_more_notices();
}
