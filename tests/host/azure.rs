//! Azure.

use std::time::Duration;

use journeyman_domain::termination_notice::Termination;
use journeyman_platform::host::termination_notice::{MetadataProvider, Notice, NoticeOrigin};
use serde_json::{Value, json};

use crate::host::metadata_service::{Cloud as Service, Metadata, faults};
use crate::host::notice_watch::{Watched, assert_about, is_failing};

const AZURE: MetadataProvider = MetadataProvider::Azure;
const LISTS: &str = "scheduledevents";

fn event(kind: &str, resources: &[&str], status: &str, not_before: &str) -> Value {
    json!({
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": resources,
        "EventStatus": status,
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    })
}

fn documented(service: &Metadata, seconds: i64) -> String {
    service.in_seconds(seconds).strftime("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

#[tokio::test]
async fn each_event_that_terminates_this_vm_is_reported_with_its_time() {
    for kind in ["Preempt", "Terminate", "Reboot", "Redeploy"] {
        let service = Metadata::start(Service::Azure).await;
        let mut watched = Watched::cloud(AZURE, service.url());
        service.wait_for_requests(LISTS, 1).await;
        let time = documented(&service, 40);
        service
            .change(|state| state.events = json!([event(kind, &["vmss_3", "vmss_7"], "Scheduled", &time)]).to_string());
        assert_about(watched.next_in_seconds().await, 40.0);
        service.wait_for_requests(LISTS, 3).await;
        watched.assert_no_more_notices();
    }
}

#[tokio::test]
async fn events_of_other_vms_and_freezes_are_ignored() {
    let service = Metadata::start(Service::Azure).await;
    let mut watched = Watched::cloud(AZURE, service.url());
    let time = documented(&service, 40);
    let events = json!([
        event("Preempt", &["vmss_70", "vmss_3"], "Scheduled", &time),
        event("Freeze", &["vmss_7"], "Scheduled", &time),
        event("SomethingNew", &["vmss_7"], "Scheduled", &time),
        event("Preempt", &[], "Scheduled", &time),
    ]);
    service.change(|state| state.events = events.to_string());
    service.wait_for_requests(LISTS, 4).await;
    watched.assert_no_more_notices();
}

#[tokio::test]
async fn an_event_without_a_valid_time_means_at_once_and_both_time_formats_are_parsed() {
    let service = Metadata::start(Service::Azure).await;
    service.change(|state| state.events = json!([event("Reboot", &["vmss_7"], "Started", "")]).to_string());
    let notice = Watched::cloud(AZURE, service.url()).next().await;
    assert_eq!(notice, Notice { origin: NoticeOrigin::Azure, termination: Termination::Soon });

    let service = Metadata::start(Service::Azure).await;
    let time = service.in_seconds(300).to_string();
    service.change(|state| state.events = json!([event("Reboot", &["VMSS_7"], "Scheduled", &time)]).to_string());
    assert_about(Watched::cloud(AZURE, service.url()).next_in_seconds().await, 300.0);

    let service = Metadata::start(Service::Azure).await;
    service.change(|state| state.events = json!([event("Preempt", &["vmss_7"], "Scheduled", "soon")]).to_string());
    assert_eq!(Watched::cloud(AZURE, service.url()).next().await.termination, Termination::Soon);
}

#[tokio::test]
async fn the_earliest_event_counts_and_a_started_one_before_all() {
    let service = Metadata::start(Service::Azure).await;
    let preempt = |seconds| event("Preempt", &["vmss_7"], "Scheduled", &documented(&service, seconds));
    let events = json!([preempt(900), preempt(60)]).to_string();
    service.change(|state| state.events = events);
    let mut watched = Watched::cloud(AZURE, service.url());
    assert_about(watched.next_in_seconds().await, 60.0);
    let events = json!([preempt(40), event("Preempt", &["vmss_7"], "Started", "")]).to_string();
    service.change(|state| state.events = events);
    assert_eq!(watched.next().await.termination, Termination::Soon);
}

#[tokio::test]
async fn a_vm_without_a_name_receives_no_notice_and_its_watch_fails() {
    let service = Metadata::start(Service::Azure).await;
    service.change(|state| state.vm = "");
    let mut watched = Watched::cloud(AZURE, service.url());
    watched.wait_for_status(is_failing).await;
    service.change(|state| state.vm = "vmss_7");
    watched.wait_for_status(|status| status.error.is_none()).await;
    watched.assert_no_more_notices();
}

/// Slower than the timeout of the other requests.
#[tokio::test]
async fn the_first_list_may_be_slow() {
    let service = Metadata::start(Service::Azure).await;
    let time = documented(&service, 60);
    service.change(|state| {
        state.first_list_takes = journeyman_domain::limits::METADATA_TIMEOUT + Duration::from_millis(500);
        state.events = json!([event("Preempt", &["vmss_7"], "Scheduled", &time)]).to_string();
    });
    let mut watched = Watched::cloud(AZURE, service.url());
    watched.next_in_seconds().await;
    assert_eq!(service.requests().iter().filter(|line| line.contains(LISTS)).count(), 1, "it was waited for");
}

#[tokio::test]
async fn no_fault_of_the_service_is_a_notice_or_stops_the_watch() {
    let service = Metadata::start(Service::Azure).await;
    service.change(|state| state.faults.extend(faults()));
    let mut watched = Watched::cloud(AZURE, service.url());
    service.wait_for_requests(LISTS, 1).await;
    service.change(|state| state.faults.extend(faults()));
    service.wait_for_requests(LISTS, faults().len() + 1).await;
    watched.assert_no_more_notices();
    let time = documented(&service, 40);
    service.change(|state| state.events = json!([event("Preempt", &["vmss_7"], "Scheduled", &time)]).to_string());
    assert_about(watched.next_in_seconds().await, 40.0);
}
