//! A person in front of headless Chromium, by the DevTools protocol over pipes.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// The length of one wait for something on a page, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One tab. It answers each dialog with yes.
pub(crate) struct Browser {
    child: Child,
    to: File,
    from: BufReader<File>,
    last: u64,
    session: Option<String>,
    /// The addresses of all requests so far.
    pub(crate) requests: Vec<String>,
    _folder: tempfile::TempDir,
}

impl Drop for Browser {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Browser {
    pub(crate) fn start(chromium: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            assert!(Command::new("mkfifo").arg(&path).status().expect("mkfifo").success());
            path
        };
        let (commands, answers) = (pipe("commands"), pipe("answers"));
        let flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions \
                     --disable-background-networking --disable-component-update --remote-debugging-pipe";
        // The shell gives the pipes the numbers that the protocol has.
        let script = format!(
            "exec \"$1\" {flags} --user-data-dir=\"$2/profile\" about:blank 3<\"$2/commands\" 4>\"$2/answers\""
        );
        let child = Command::new("/bin/sh")
            .args(["-c", &script, "sh", chromium])
            .arg(folder.path())
            .env("HOME", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        // Opening waits for the other side.
        let to = File::options().write(true).open(commands).expect("a pipe");
        let from = BufReader::new(File::open(answers).expect("a pipe"));
        let mut browser = Self { child, to, from, last: 0, session: None, requests: Vec::new(), _folder: folder };
        let tab = browser.call("Target.createTarget", json!({ "url": "about:blank" }))["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({ "targetId": tab, "flatten": true }));
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Network.enable", "Runtime.enable"] {
            browser.call(domain, json!({}));
        }
        browser
    }

    fn send(&mut self, method: &str, params: &Value) -> u64 {
        self.last += 1;
        let mut message = json!({ "id": self.last, "method": method, "params": params });
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.to.write_all(format!("{message}\0").as_bytes()).expect("the browser reads");
        self.last
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.try_call(method, params).unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    fn try_call(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        let id = self.send(method, &params);
        loop {
            let mut text = Vec::new();
            self.from.read_until(0, &mut text).expect("the browser answers");
            assert!(!text.is_empty(), "the browser has ended");
            let mut message: Value = serde_json::from_slice(text.strip_suffix(b"\0").unwrap_or(&text)).expect("JSON");
            if message["id"] == id {
                let error = message["error"].take();
                return if error.is_null() { Ok(message["result"].take()) } else { Err(error) };
            }
            match message["method"].as_str() {
                Some("Network.requestWillBeSent") => {
                    self.requests.push(message["params"]["request"]["url"].as_str().unwrap_or_default().to_owned());
                }
                Some("Page.javascriptDialogOpening") => {
                    self.send("Page.handleJavaScriptDialog", &json!({ "accept": true }));
                }
                _ => {}
            }
        }
    }

    /// The value of an expression, which may be a promise.
    pub(crate) fn eval(&mut self, expression: &str) -> Value {
        let wanted =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true });
        let mut answer = self.call("Runtime.evaluate", wanted);
        assert!(answer["exceptionDetails"].is_null(), "{expression}: {}", answer["exceptionDetails"]);
        answer["result"]["value"].take()
    }

    /// Waits until an expression is true; pages may change meanwhile.
    pub(crate) fn until(&mut self, expression: &str) {
        let began = std::time::Instant::now();
        let asked = format!(
            "new Promise((done) => {{ const look = (left) => {{ let is = false; try {{ is = !!({expression}); }} catch {{}} \
             if (is || left === 0) done(is); else setTimeout(look, 50, left - 1); }}; look(20); }})"
        );
        loop {
            let wanted = json!({ "expression": asked, "awaitPromise": true, "returnByValue": true });
            // A page that is left has no answer.
            if self.try_call("Runtime.evaluate", wanted).is_ok_and(|answer| answer["result"]["value"] == true) {
                return;
            }
            if began.elapsed() > TIMEOUT {
                let text = self.eval("document.body ? document.body.innerText : ''");
                panic!("not seen: {expression}\n{}", text.as_str().unwrap_or_default());
            }
        }
    }

    /// Waits until the page has a text.
    pub(crate) fn sees(&mut self, text: &str) {
        self.until(&format!("document.querySelector('main') && document.body.innerText.includes({})", json!(text)));
    }

    pub(crate) fn goes_to(&mut self, address: &str) {
        self.call("Page.navigate", json!({ "url": address }));
        self.until(&format!("document.readyState === 'complete' && location.href.startsWith({})", json!(address)));
    }

    /// Clicks the visible button or link with this text.
    pub(crate) fn clicks(&mut self, text: &str) {
        let found = format!(
            "[...document.querySelectorAll('button, a')].find((one) => one.innerText === {} && one.offsetParent)",
            json!(text)
        );
        self.until(&found);
        self.eval(&format!("void {found}.click()"));
    }

    /// Types into the field of a selector.
    pub(crate) fn types(&mut self, selector: &str, text: &str) {
        self.eval(&format!("document.querySelector({}).focus()", json!(selector)));
        self.call("Input.insertText", json!({ "text": text }));
    }

    /// Presses a key, such as `Tab`.
    pub(crate) fn presses(&mut self, key: &str) {
        let text = if key == "Enter" { "\r" } else { "" };
        let code = match key {
            "Enter" => 13,
            "Tab" => 9,
            _ => 0,
        };
        for kind in ["keyDown", "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            if kind == "keyDown" && !text.is_empty() {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event);
        }
    }

    /// The width of the window, and whether its user wants dark pages.
    pub(crate) fn looks(&mut self, width: u32, height: u32, dark: bool) {
        let screen = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.call("Emulation.setDeviceMetricsOverride", screen);
        let scheme = if dark { "dark" } else { "light" };
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] }),
        );
    }

    pub(crate) fn screenshot(&mut self, path: &Path) {
        let data = self.call("Page.captureScreenshot", json!({ "format": "png" }))["data"].clone();
        let image = STANDARD.decode(data.as_str().expect("an image")).expect("base64");
        std::fs::write(path, image).expect("the image is written");
    }
}
