//! Google's Compute Engine.

use journeyman_domain::termination_notice::Termination;
use journeyman_platform::host::termination_notice::{MetadataProvider, Notice, NoticeOrigin};

use crate::host::metadata_service::{Cloud as Service, Metadata, RESET, faults};
use crate::host::notice_watch::{Watched, assert_about};

const GOOGLE: MetadataProvider = MetadataProvider::Gcp;
const WAITS: &str = "preempted?wait_for_change=true";

#[tokio::test]
async fn a_preemption_gives_thirty_seconds() {
    let service = Metadata::start(Service::Google).await;
    let mut watched = Watched::cloud(GOOGLE, service.url());
    service.wait_for_requests(WAITS, 1).await;
    service.change(|state| state.preempted = "TRUE");
    assert_about(watched.next_in_seconds().await, 30.0);
    service.wait_for_requests(WAITS, 1).await;
    watched.assert_no_more_notices();
    assert!(
        service.requests().iter().all(|line| !line.contains("wait") || line.contains("last_etag=")),
        "{:?}",
        service.requests()
    );
}

#[tokio::test]
async fn a_preemption_before_the_first_poll_means_at_once() {
    let service = Metadata::start(Service::Google).await;
    service.change(|state| state.preempted = "TRUE");
    let notice = Watched::cloud(GOOGLE, service.url()).next().await;
    assert_eq!(notice, Notice { origin: NoticeOrigin::Gcp, termination: Termination::Soon });
}

#[tokio::test]
async fn a_preemption_while_the_connection_broke_is_not_missed() {
    let service = Metadata::start(Service::Google).await;
    service.change(|state| state.faults.extend(vec![RESET; 4]));
    let mut watched = Watched::cloud(GOOGLE, service.url());
    service.wait_for_requests(WAITS, 1).await;
    service.change(|state| {
        state.preempted = "TRUE";
        state.faults.extend(vec![RESET; 2]);
    });
    let left = watched.next_in_seconds().await;
    assert!(left > 5.0 && left <= 30.0, "{left}");
}

#[tokio::test]
async fn terminating_maintenance_gives_a_minute_and_a_migration_is_ignored() {
    let service = Metadata::start(Service::Google).await;
    let mut watched = Watched::cloud(GOOGLE, service.url());
    let waits = "maintenance-event?wait_for_change=true";
    service.wait_for_requests(waits, 1).await;
    service.change(|state| state.maintenance = "MIGRATE_ON_HOST_MAINTENANCE");
    service.wait_for_requests(waits, 1).await;
    watched.assert_no_more_notices();
    service.change(|state| state.maintenance = "TERMINATE_ON_HOST_MAINTENANCE");
    assert_about(watched.next_in_seconds().await, 60.0);
}

#[tokio::test]
async fn a_reply_without_googles_header_is_ignored() {
    let service = Metadata::start(Service::Google).await;
    service.change(|state| {
        state.flavor = None;
        state.preempted = "TRUE";
    });
    let mut watched = Watched::cloud(GOOGLE, service.url());
    service.wait_for_requests("preempted", 3).await;
    watched.assert_no_more_notices();
    service.change(|state| state.flavor = Some("Google"));
    assert_eq!(watched.next().await.termination, Termination::Soon);
}

#[tokio::test]
async fn no_fault_of_the_service_is_a_notice_or_stops_the_watch() {
    let service = Metadata::start(Service::Google).await;
    service.change(|state| state.faults.extend(faults()));
    let mut watched = Watched::cloud(GOOGLE, service.url());
    service.wait_for_requests("instance/", faults().len()).await;
    service.wait_for_requests(WAITS, 1).await;
    watched.assert_no_more_notices();
    service.change(|state| state.preempted = "TRUE");
    assert_about(watched.next_in_seconds().await, 30.0);
}
