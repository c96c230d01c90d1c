//! A page in headless Chromium, with scripts and without.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

/// How long one page may take, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The browser that `tests/run` found; without it nothing is tested.
pub(crate) fn chromium() -> Option<String> {
    let named = std::env::var("JOURNEYMAN_TEST_CHROMIUM").ok();
    let there = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    let found = named.or_else(|| there.iter().find(|path| Path::new(path).exists()).map(ToString::to_string));
    assert!(found.is_some() || std::env::var("CI").as_deref() != Ok("true"), "CI=true, and there is no browser");
    if found.is_none() {
        eprintln!("NOT TESTED: there is no chromium; JOURNEYMAN_TEST_CHROMIUM names one");
    }
    found
}

/// The browser runs scripts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scripts {
    On,
    Off,
}

/// What a person sets who wants no scripts.
const NO_SCRIPTS: &str = r#"{"profile":{"default_content_setting_values":{"javascript":2}}}"#;

async fn browse(chromium: &str, scripts: Scripts, arguments: &[&str], address: &str) -> Output {
    let profile = tempfile::tempdir().expect("a folder");
    if scripts == Scripts::Off {
        std::fs::create_dir(profile.path().join("Default")).expect("a folder");
        std::fs::write(profile.path().join("Default/Preferences"), NO_SCRIPTS).expect("a file");
    }
    let mut command = tokio::process::Command::new(chromium);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"])
        .args(["--no-first-run", "--disable-extensions", "--disable-background-networking"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(address)
        .env("HOME", profile.path())
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true);
    tokio::time::timeout(TIMEOUT, command.output()).await.expect("the browser ends").expect("the browser starts")
}

/// The document as it stands after so many milliseconds of the page's own time.
pub(crate) async fn dom(chromium: &str, scripts: Scripts, address: &str, budget: u32) -> String {
    let budget = format!("--virtual-time-budget={budget}");
    let output = browse(chromium, scripts, &["--dump-dom", &budget], address).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("UTF-8")
}
