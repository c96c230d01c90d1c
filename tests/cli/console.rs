//! The console in a browser: what a person does with `journeyman dev` and `journeyman console`.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::cli::host::{Host, TOKEN};
use crate::cli::server::{Server, get};
use crate::support::browser::Browser;
use crate::support::headless::chromium;

/// `journeyman dev` with a page, and what is needed to use it.
struct Dev {
    host: Host,
    server: Server,
    page: String,
    token: String,
}

impl Dev {
    fn start() -> Self {
        let host = Host::new();
        let mut server = Server::start(&mut host.journeyman(&["dev", "--set", "log.task_log_times=true"]));
        let page =
            server.prints("page ").split_whitespace().last().expect("an address").trim_end_matches('/').to_owned();
        server.prints("Ctrl-C");
        let state: Value = serde_json::from_str(&host.read(".local/state/journeyman/dev.json")).expect("JSON");
        let token = state["access_token"].as_str().expect("a token").to_owned();
        Self { host, server, page, token }
    }

    fn shell(&self, name: &str, script: &str) -> String {
        self.host.create(&["--name", name, "--", "/bin/sh", "-c", script])
    }

    fn go(&self, browser: &mut Browser, path: &str) {
        browser.goes_to(&format!("{}{path}", self.page));
    }

    /// Gives the page the token, by the keyboard.
    fn sign_in(&self, browser: &mut Browser) {
        self.go(browser, "/");
        browser.clicks("use a token");
        browser.types("#token", &self.token);
        browser.presses("Enter");
        browser.sees("forget the token");
    }
}

/// A link is called so too.
const SUBMIT: &str = "document.querySelector('[data-create]').click()";

/// Where pictures go that a person looks at; `UPDATE_GOLDEN=1` writes that of README.
fn screenshot(browser: &mut Browser, name: &str) {
    let Ok(folder) = std::env::var("JOURNEYMAN_TEST_SCREENSHOTS") else { return };
    for (look, width, height, dark) in
        [("wide", 1280, 900, false), ("dark", 1280, 900, true), ("phone", 390, 900, false)]
    {
        browser.looks(width, height, dark);
        let fits = browser.eval("document.documentElement.scrollWidth <= window.innerWidth");
        assert_eq!(fits, true, "{name} is wider than {width} points");
        browser.screenshot(&PathBuf::from(&folder).join(format!("{name}-{look}.png")));
    }
    browser.looks(1280, 900, false);
}

/// Each page fits a phone, is dark where that is wanted, and asks no other host.
fn check_looks(browser: &mut Browser, name: &str) {
    for (width, dark) in [(390, true), (1280, false)] {
        browser.looks(width, 900, dark);
        let fits = browser.eval("document.documentElement.scrollWidth <= window.innerWidth");
        assert_eq!(fits, true, "{name} is wider than {width} points");
        let paper = browser.eval("getComputedStyle(document.body).backgroundColor");
        assert_eq!(paper, if dark { "rgb(17, 20, 24)" } else { "rgb(255, 255, 255)" }, "{name}");
    }
    screenshot(browser, name);
}

#[test]
fn a_person_creates_follows_reruns_and_cancels_tasks_in_a_browser() {
    let Some(chromium) = chromium() else { return };
    let dev = Dev::start();
    let mut browser = Browser::start(&chromium);
    dev.sign_in(&mut browser);

    // Create, by the form of the handler's schema.
    let go = dev.host.join("go");
    let script = format!(
        "echo first; while [ ! -e {} ]; do sleep 0.05; done; printf '\\033[31msecond\\033[0m\\n'",
        go.display()
    );
    dev.go(&mut browser, "/create/dev?queue=dev/command");
    browser.until("document.body.classList.contains('may')");
    browser.types("[data-name]", "followed <b>");
    browser.types("[data-field=command]", "not JSON");
    browser.eval(SUBMIT);
    browser.until("document.querySelector('#message').innerText.startsWith('failed: command')");
    browser.eval("document.querySelector('[data-field=command]').value = ''");
    browser.types("[data-field=command]", &json!([["/bin/sh", "-c", script]]).to_string());
    check_looks(&mut browser, "create");
    browser.eval(SUBMIT);
    browser.until("location.pathname.startsWith('/tasks/dev/')");
    browser.sees("followed <b>");
    browser.sees("RUNNING");

    // Follow.
    browser.clicks("log");
    browser.until("document.querySelector('#L3')?.innerText.includes('first')");
    browser.until("document.querySelector('#L3 time')?.innerText.startsWith('+')");
    assert_eq!(browser.eval("document.querySelector('.log .c1') === null"), true);
    std::fs::write(&go, "").expect("the file is written");
    browser.until("document.querySelector('.log .c1')?.innerText === 'second'");
    browser.sees("exit status 0");
    check_looks(&mut browser, "log");

    // Fail, and run again.
    let failed = dev.shell("nightly", "echo trouble; exit 3");
    dev.go(&mut browser, &format!("/tasks/dev/{failed}"));
    browser.sees("why command 0: exit status 3");
    browser.sees("trouble");
    check_looks(&mut browser, "task");
    browser.clicks("rerun");
    browser.sees("rerun: done");
    browser.sees("run 1");
    // The form fills in the payload with the token; it is changed there.
    browser.sees("FAILED");
    browser.clicks("run again with a changed payload");
    browser.until("document.querySelector('[data-field=command]')?.value.includes('trouble')");
    browser.eval("{ const field = document.querySelector('[data-field=command]'); field.value = field.value.replace('exit 3', 'exit 0'); }");
    browser.eval(SUBMIT);
    browser.sees("COMPLETED");

    // Cancel.
    let running = dev.shell("endless", "sleep 1000");
    dev.go(&mut browser, &format!("/tasks/dev/{running}"));
    browser.sees("RUNNING");
    browser.clicks("cancel");
    browser.sees("EXCEPTION");

    // Many at once: what is asked about is what was counted.
    for _ in 0..3 {
        let id = dev.shell("bulk", "exit 1");
        dev.host.task(&["wait", &id]);
    }
    dev.go(&mut browser, "/tasks/dev?state=failed&name=bulk&since=1h");
    browser.sees("bulk");
    browser.clicks("rerun these");
    browser.sees("3 tasks to rerun");
    browser.clicks("rerun 3 tasks");
    browser.sees("3 done");
    browser.until("!document.body.innerText.includes('to rerun')");
    check_looks(&mut browser, "tasks");

    // A list without a filter is live.
    dev.go(&mut browser, "/tasks/dev");
    browser.sees("endless");
    dev.shell("created later", "exit 0");
    browser.sees("created later");

    for (path, words) in [
        ("/", "Recent results"),
        ("/fleet", "slots busy"),
        ("/queues/dev/dev/command", "run time"),
        (&format!("/groups/dev/{failed}"), "nightly"),
        (&format!("/workers/{}", hostname(&dev)), "Slots in the last hour"),
    ] {
        dev.go(&mut browser, path);
        browser.sees(words);
        check_looks(&mut browser, path.split('/').nth(1).filter(|name| !name.is_empty()).unwrap_or("overview"));
    }
    let foreign: Vec<_> = browser.requests.iter().filter(|url| !url.starts_with(&dev.page)).collect();
    assert!(foreign.iter().all(|url| url.starts_with("about:") || url.starts_with("chrome")), "{foreign:?}");
    dev.server.quit();
}

fn hostname(dev: &Dev) -> String {
    dev.host.status()["id"].as_str().expect("an id").to_owned()
}

/// `UPDATE_GOLDEN=1` takes the picture of README.
#[test]
fn the_picture_of_readme_is_the_console() {
    let Some(chromium) = chromium() else { return };
    let dev = Dev::start();
    for (name, script) in [
        ("lint", "sleep 1"),
        ("unit tests", "sleep 2; echo '17 passed, 1 failed'; exit 1"),
        ("package", "sleep 1"),
        ("integration tests", "sleep 2"),
        ("docs", "true"),
    ] {
        dev.shell(name, script);
    }
    for name in ["lint", "unit tests", "package", "integration tests", "docs"] {
        let found = dev.host.json(&["task", "list", "--name", name]);
        let id = found["tasks"][0]["status"]["taskId"].as_str().expect("an id").to_owned();
        dev.host.task(&["wait", &id]);
    }
    for name in ["render 0041", "render 0042", "simulate"] {
        dev.shell(name, "sleep 1000");
    }
    let mut browser = Browser::start(&chromium);
    dev.go(&mut browser, "/");
    browser.sees("3/4 busy");
    browser.sees("integration tests");
    browser.looks(1280, 800, false);
    let picture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/guide/console.png");
    if std::env::var("UPDATE_GOLDEN").is_ok() {
        browser.screenshot(&picture);
    }
    let image = std::fs::read(&picture).expect("the picture");
    let size = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().expect("four bytes"));
    assert_eq!((size(16), size(20)), (1280, 800), "a PNG of this size");
    let readme = include_str!("../../README.md");
    assert!(readme.contains("](src/guide/console.png)"), "README shows it");
    dev.server.quit();
}

#[test]
fn the_keyboard_alone_reaches_everything() {
    let Some(chromium) = chromium() else { return };
    let dev = Dev::start();
    let task = dev.shell("typed", "exit 1");
    dev.host.task(&["wait", &task]);
    let mut browser = Browser::start(&chromium);
    dev.sign_in(&mut browser);
    let reach = |browser: &mut Browser, text: &str| {
        browser.until("document.readyState === 'complete' && document.body.classList.contains('may')");
        browser.sees("live");
        for _ in 0..40 {
            browser.presses("Tab");
            if browser.eval("document.activeElement.innerText") == text {
                return browser.presses("Enter");
            }
        }
        panic!("no way to {text:?}");
    };
    reach(&mut browser, "tasks");
    browser.until("location.pathname === '/tasks/dev'");
    reach(&mut browser, "typed");
    browser.until("location.pathname.startsWith('/tasks/dev/')");
    reach(&mut browser, "rerun");
    browser.sees("rerun: done");
    dev.server.quit();
}

#[test]
fn pages_need_no_scripts_to_be_read_and_a_token_to_change() {
    let dev = Dev::start();
    let task = dev.shell("plain", "printf '# Report\\n[x](javascript:alert(1)) <script>1</script>' > r.md; exit 3");
    dev.host.task(&["wait", &task]);
    let address = dev.page.strip_prefix("http://").expect("HTTP");
    let phases = format!("<a href=\"/tasks/dev/{task}\">{task}/0</a>");
    for (path, words) in [
        ("/".to_owned(), "task queues"),
        (format!("/workers/{}", hostname(&dev)), &phases),
        ("/fleet".to_owned(), "slots busy"),
        ("/tasks/dev?state=failed".to_owned(), "plain"),
        (format!("/tasks/dev/{task}"), "command 0: exit status 3"),
        (format!("/tasks/dev/{task}/log"), "executing command 0"),
        (format!("/tasks/dev/{task}/log?find=RESULT"), "1 lines with"),
        (format!("/groups/dev/{task}"), "plain"),
        ("/create/dev?queue=dev/command".to_owned(), "maxRunTime"),
    ] {
        let page = get(address, &path);
        assert!(page.contains("200 OK") && page.contains(words), "{path}: {page}");
        assert!(page.contains("content-security-policy: default-src 'none'"), "{path}");
    }
    for path in
        ["/tasks/dev/nonsense", "/tasks/other", "/workers/other", "/queues/dev/no/such", "/tasks/dev?since=soon"]
    {
        let page = get(address, path);
        assert!(page.contains(" 404 ") || page.contains(" 400 "), "{path}: {page}");
    }
    // A payload is shown with the token only.
    let form = get(address, &format!("/create/dev?from={task}"));
    assert!(form.contains("filled in once the token is given") && !form.contains("javascript:alert"), "{form}");
    let post = |path: &str, token: &str, body: &str| {
        let token = if token.is_empty() { String::new() } else { format!("-H Authorization:\\ Bearer\\ {token}") };
        let script = format!(
            "curl -s -o /dev/null -w '%{{http_code}}' {token} -H Content-Type:\\ application/json -d '{body}' {}{path}",
            dev.page
        );
        let said = std::process::Command::new("/bin/sh").args(["-c", &script]).output().expect("curl runs");
        String::from_utf8(said.stdout).expect("UTF-8")
    };
    let rerun = format!("/tasks/dev/{task}/rerun");
    assert_eq!(
        [post(&rerun, "", "{}"), post(&rerun, "wrong", "{}"), post(&rerun, &dev.token, "{}")],
        ["401", "401", "200"]
    );
    assert_eq!(post("/bulk/dev/cancel", "", "{\"tasks\":[]}"), "401");
    assert_eq!(post("/tasks/dev", "", "{}"), "401");
    dev.server.quit();
}

#[test]
fn a_queue_that_checks_its_callers_shows_its_pages_with_a_token() {
    let host = Host::new();
    host.write("token", &format!("{TOKEN}-of-the-pages-which-is-long"));
    let mut command = host.journeyman(&["queue", "--db", "queue.db", "--listen", "127.0.0.1:0"]);
    command
        .env("TEST_TOKEN", TOKEN)
        .env("JOURNEYMAN__QUEUE__CLIENTS__ME__ACCESS_TOKEN_FILE", "env:TEST_TOKEN")
        .env("JOURNEYMAN__HTTP__TOKEN_FILE", host.join("token"));
    let mut queue = Server::start(&mut command);
    let line: Value = serde_json::from_str(&queue.logs("root_url")).expect("JSON");
    let root = line["root_url"].as_str().expect("the root").to_owned();
    let address = root.strip_prefix("http://").expect("HTTP").to_owned();
    for path in ["/", "/tasks/queue", "/fleet"] {
        let page = get(&address, path);
        assert!(page.contains("its pages are shown with the token of"), "{path}: {page}");
        assert!(!page.contains("task queues"), "{path}: {page}");
    }
    // No page stands in for what a task has made: a script would take its content for a page.
    let content = get(&address, "/tasks/queue/XJOIQcqPRgykTZR_00-b1w/0/public/report.txt");
    assert!(content.contains(" 401 ") && content.contains("text/plain") && !content.contains("<main"), "{content}");
    let Some(chromium) = chromium() else { return };
    let mut browser = Browser::start(&chromium);
    browser.goes_to(&format!("{root}/tasks/queue"));
    browser.clicks("use a token");
    browser.types("#token", &format!("{TOKEN}-of-the-pages-which-is-long"));
    browser.presses("Enter");
    browser.sees("No task is like this.");
    browser.goes_to(&format!("{root}/"));
    browser.sees("No task has been created yet.");
}

#[test]
fn a_console_shows_roles_of_several_hosts_and_waits_for_none() {
    let dev = Dev::start();
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = format!("http://{}", silent.local_addr().expect("an address"));
    let file = dev.host.join("token");
    std::fs::write(&file, &dev.token).expect("the file is written");
    let root = dev.host.json(&["status"])["sources"][0]["description"].as_str().expect("text").to_owned();
    let root =
        root.split_whitespace().find(|word| word.starts_with("http")).expect("a URL").trim_end_matches(',').to_owned();
    dev.host.write(
        "console.toml",
        &format!(
            "[http]\nlisten = \"127.0.0.1:0\"\ntoken_file = \"token\"\n\
             [console.target.fleet]\nkind = \"worker\"\nurls = [\"{}\", \"{silent}\"]\n\
             [console.target.ci]\nkind = \"queue\"\nurls = [\"{root}\"]\nclient_id = \"dev\"\ntoken_file = \"token\"\n\
             [console.target.dead]\nkind = \"queue\"\nurls = [\"{silent}\"]\n",
            dev.page
        ),
    );
    let task = dev.shell("seen", "exit 0");
    dev.host.task(&["wait", &task]);
    dev.host.succeed(&["config", "check", "console.toml"]);
    let mut console = Server::start(&mut dev.host.journeyman(&["console", "--config", "console.toml"]));
    let line: Value = serde_json::from_str(&console.logs("the console")).expect("JSON");
    let address = line["address"].as_str().expect("an address").to_owned();
    let page = get(&address, "/fleet");
    assert!(page.contains("fleet-2 has not answered yet") || page.contains("fleet-2 at"), "{page}");
    // The worker has answered as soon as it was asked.
    let known = hostname(&dev);
    let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
    while !get(&address, "/fleet").contains(&format!("/workers/{known}")) {
        assert!(std::time::Instant::now() < until, "{}", get(&address, "/fleet"));
        std::thread::yield_now();
    }
    let page = get(&address, &format!("/tasks/ci/{task}"));
    assert!(page.contains("prepare 0.") && page.contains("upload 0."), "the worker's phases: {page}");
    let overview = get(&address, "/");
    assert!(overview.contains("dev/command") && overview.contains("the queue did not answer within 1s"), "{overview}");
    assert!(get(&address, "/create/ci?queue=dev/command").contains("maxRunTime"), "the schema of the worker");
    console.drain();
    dev.server.quit();
}
