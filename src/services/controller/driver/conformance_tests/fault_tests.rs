//! Drivers that cannot be asked, and ones that refuse.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::super::systemd::SystemdDriver;
use super::*;

pub(super) fn docker_pool(host: &str, image: &str) -> PoolConfig {
    let (host, image, network) = (host.to_owned(), image.to_owned(), Some("host".to_owned()));
    let docker = Some(DockerDriverConfig { host, image, network });
    PoolConfig { driver: PoolDriver::Docker, docker, ..PoolConfig::default() }
}

/// A daemon that tells its version, and replies to everything else with this status; without one, with nothing.
#[expect(clippy::disallowed_methods, reason = "it ends with the runtime of the test")]
fn refusing_daemon(place: &Fixture, status: Option<u16>) -> PoolConfig {
    let path = place.path().join(format!("{}.sock", status.unwrap_or_default()));
    let listener = UnixListener::bind(&path).expect("a socket");
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut head, mut byte) = (Vec::new(), [0]);
                while !head.ends_with(b"\r\n\r\n") && connection.read_exact(&mut byte).await.is_ok() {
                    head.push(byte[0]);
                }
                let (status, body) = match status {
                    _ if head.starts_with(b"GET /version") => (200, r#"{"ApiVersion":"1.44","MinAPIVersion":"1.24"}"#),
                    Some(status) => (status, r#"{"message":"not today"}"#),
                    None => return std::future::pending().await,
                };
                let length = body.len();
                let reply = format!(
                    "HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\
                     connection: close\r\n\r\n{body}"
                );
                connection.write_all(reply.as_bytes()).await.ok();
            });
        }
    });
    docker_pool(&format!("unix://{}", path.display()), "worker:1")
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_c11_a_daemon_that_cannot_be_asked_fails_no_worker_and_the_error_names_its_socket() {
    let place = Fixture::new();
    let mut pools: Vec<PoolConfig> =
        [401, 403, 409, 503].map(|status| refusing_daemon(&place, Some(status))).into_iter().collect();
    pools.push(docker_pool("unix:///nonexistent/docker.sock", "worker:1"));
    for settings in pools {
        let host = settings.docker.clone().expect("a daemon").host;
        let mut handle = DriverHandle::open("core", &place.test_pool("core", settings).settings, Clock::boot())
            .expect("it opens")
            .expect("a driver");
        handle.activate();
        handle.start(worker_spec(&place, "lives"));
        let (mut has_started, mut has_listed) = (false, false);
        while !(has_started && has_listed) {
            let why = match timeout(TEST_TIMEOUT, handle.next_event()).await.expect("an event") {
                DriverEvent::StartFailed { error: StartError::Driver(DriverError(why)), .. } => {
                    has_started = true;
                    why
                }
                DriverEvent::Listed(Err(DriverError(why))) => {
                    has_listed = true;
                    why
                }
                other @ (DriverEvent::Started(_)
                | DriverEvent::StartFailed { .. }
                | DriverEvent::Listed(_)
                | DriverEvent::ListSlow(_)) => panic!("{host}: {other:?}"),
            };
            assert!(why.contains(&host), "{why}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_a_container_that_cannot_be_created_is_a_failed_worker() {
    let place = Fixture::new();
    let pool = place.test_pool("core", refusing_daemon(&place, Some(404)));
    let mut handle = DriverHandle::open("core", &pool.settings, Clock::boot()).expect("it opens").expect("a driver");
    handle.activate();
    handle.start(worker_spec(&place, "lives"));
    loop {
        match timeout(TEST_TIMEOUT, handle.next_event()).await.expect("an event") {
            DriverEvent::StartFailed { error: StartError::Worker(why), .. } => {
                return assert!(why.contains("not today"), "{why}");
            }
            DriverEvent::Listed(_) => {}
            other @ (DriverEvent::Started(_) | DriverEvent::StartFailed { .. } | DriverEvent::ListSlow(_)) => {
                panic!("{other:?}")
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn c9_a_daemon_that_hangs_is_reported_within_five_seconds() {
    let place = Fixture::new();
    let pool = place.test_pool("core", refusing_daemon(&place, None));
    let mut handle = DriverHandle::open("core", &pool.settings, Clock::boot()).expect("it opens").expect("a driver");
    handle.activate();
    let event = timeout(Duration::from_secs(5), handle.next_event()).await.expect("an event within five seconds");
    assert!(matches!(event, DriverEvent::ListSlow(waited) if waited >= DRIVER_LIST_SLOW), "{event:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn c10_the_first_line_of_systemctl_is_the_reason() {
    let place = Fixture::new();
    for (status, is_driver) in [(1, true), (4, true), (5, false), (6, false)] {
        let says = "Failed to start it: Access denied\\nSee system logs and \'systemctl status\' for details.\\n";
        let script = format!("printf \"{says}\" >&2; exit {status}");
        let config = SystemdDriverConfig {
            unit: "worker".to_owned(),
            systemctl: vec!["/bin/sh".to_owned(), "-c".to_owned(), script, "systemctl".to_owned()],
        };
        let store = Arc::new(StateStore::open(place.path()).expect("the state"));
        let (pool, folder) = ("core".to_owned(), place.path().to_owned());
        let driver = SystemdDriver { config, pool, folder, store };
        let reason = format!("Failed to start it: Access denied (exit status: {status})");
        let expected = if is_driver { StartError::Driver(DriverError(reason)) } else { StartError::Worker(reason) };
        assert_eq!(driver.start(worker_spec(&place, "lives")).await, Err(expected));
    }
}
