//! Polling and deleting against Azurite, Microsoft's emulator of Azure Queue Storage.
//!
//! A gremlin answers pollTaskUrls with URLs signed here, as a queue service does.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::{SignedDuration, Timestamp};
use journeyman::source::Source;
use journeyman::source::taskcluster::{ApiConfig, ArtifactStorage, Config, Dialect, Taskcluster};
use journeyman_domain::id::TaskId;
use serde_json::json;

use crate::conformance::bench::{Adapter, Bench, Fut, Need, Rig, Span, Spec};
use crate::support::gremlin::{self, Gremlin};

/// The default account of Azurite and its published key.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// Visibility timeout; Azure has whole seconds only.
const HIDDEN_S: u32 = 1;

pub(crate) fn adapter() -> Adapter {
    match std::env::var("JOURNEYMAN_TEST_AZURITE").ok().filter(|url| !url.is_empty()) {
        Some(url) => {
            let base = url.trim_end_matches('/').trim_end_matches(ACCOUNT).trim_end_matches('/').to_owned();
            Adapter::Present { rigs: vec![Box::new(Azurite { base })] }
        }
        None => Adapter::Absent {
            name: "azurite",
            why: "JOURNEYMAN_TEST_AZURITE names none; tests/run starts one".into(),
            needed: true,
        },
    }
}

struct Azurite {
    base: String,
}

impl Rig for Azurite {
    fn name(&self) -> String {
        "azurite".into()
    }

    fn can(&self, need: Need) -> bool {
        matches!(need, Need::Messages | Need::Redelivery | Need::Garbage)
    }

    fn bench(&self) -> Fut<'static, Arc<dyn Bench>> {
        let base = self.base.clone();
        Box::pin(async move {
            let queue = format!("q-{}", uuid::Uuid::new_v4().simple());
            let bench = AzuriteBench {
                service: Gremlin::start(|_| vec![poll_task_urls(&base, &queue)]).await,
                http: client(),
                base,
                queue,
                created: AtomicUsize::new(0),
            };
            bench.call("PUT", "", "").await;
            Arc::new(bench) as Arc<dyn Bench>
        })
    }
}

fn client() -> reqwest::Client {
    // Fails if already installed.
    rustls::crypto::ring::default_provider().install_default().ok();
    reqwest::Client::builder().no_proxy().build().expect("a client can be made")
}

fn hmac(text: &str) -> String {
    let key = STANDARD.decode(KEY).expect("the key is base64");
    let key = hawk::Key::new(key, hawk::SHA256).expect("it is a key");
    STANDARD.encode(key.sign(text.as_bytes()).expect("it can be signed"))
}

/// The parameters of a signed URL that may receive and delete, as the queue service of 2019 issued them.
fn sas(queue: &str) -> String {
    let at =
        |minutes| (Timestamp::now() + SignedDuration::from_mins(minutes)).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let (from, until) = (at(-15), at(30));
    let signature = hmac(&format!("p\n{from}\n{until}\n/queue/{ACCOUNT}/{queue}\n\n\n\n2015-04-05"));
    let encode = |text| urlencoding::encode(text).into_owned();
    format!("sv=2015-04-05&se={}&sp=p&sig={}&st={}", encode(&until), encode(&signature), encode(&from))
}

fn poll_task_urls(base: &str, queue: &str) -> gremlin::Act {
    let (sas, place) = (sas(queue), format!("{base}/{ACCOUNT}/{queue}/messages"));
    let pair = json!({
        "signedPollUrl": format!("{place}?visibilitytimeout={HIDDEN_S}&{sas}"),
        "signedDeleteUrl": format!("{place}/{{{{messageId}}}}?popreceipt={{{{popReceipt}}}}&{sas}"),
    });
    let expires = (Timestamp::now() + SignedDuration::from_mins(30)).to_string();
    gremlin::json(200, &json!({ "queues": [pair], "expires": expires }))
}

struct AzuriteBench {
    service: Gremlin,
    http: reqwest::Client,
    base: String,
    queue: String,
    created: AtomicUsize,
}

impl AzuriteBench {
    /// A call signed with the account key.
    async fn call(&self, method: &str, below: &str, body: &str) {
        let path = format!("/{ACCOUNT}/{}{below}", self.queue);
        let at = gremlin::date(0);
        let length = if body.is_empty() { String::new() } else { body.len().to_string() };
        let headers = format!("x-ms-date:{at}\nx-ms-version:2015-04-05");
        let signed = format!("{method}\n\n\n{length}\n\n\n\n\n\n\n\n\n{headers}\n/{ACCOUNT}{path}");
        let method = reqwest::Method::from_bytes(method.as_bytes()).expect("a method");
        let response = self
            .http
            .request(method, format!("{}{path}", self.base))
            .header("x-ms-date", at)
            .header("x-ms-version", "2015-04-05")
            .header("authorization", format!("SharedKey {ACCOUNT}:{}", hmac(&signed)))
            .header("content-length", body.len())
            .body(body.to_owned())
            .send()
            .await
            .expect("azurite answers");
        let status = response.status();
        assert!(status.is_success(), "{status}: {}", response.text().await.unwrap_or_default());
    }

    async fn put(&self, text: &str) {
        let body = format!("<QueueMessage><MessageText>{text}</MessageText></QueueMessage>");
        self.call("POST", "/messages", &body).await;
    }
}

impl Bench for AzuriteBench {
    fn source(&self, worker: &str) -> Arc<dyn Source> {
        let settings = Config {
            api: ApiConfig::new(&self.service.url(), None),
            dialect: Dialect::Azure,
            task_queue: "prov/wt".into(),
            worker_group: "wg".into(),
            worker_id: worker.into(),
            artifact_storage: ArtifactStorage::S3,
        };
        Arc::new(Taskcluster::new(settings).expect("the settings are good"))
    }

    fn create(&self, _spec: Spec) -> Fut<'_, TaskId> {
        Box::pin(async {
            let task = format!("task-{:03}QACAAAAAAAAAAA", self.created.fetch_add(1, Ordering::Relaxed));
            let said = json!({ "taskId": task, "runId": 0, "hintId": "h" }).to_string();
            self.put(&STANDARD.encode(said)).await;
            TaskId::parse(&task).expect("a good id")
        })
    }

    fn garbage(&self) -> Fut<'_, ()> {
        Box::pin(self.put("&lt;no &amp; base64&gt;"))
    }

    fn pass(&self, _span: Span) -> Fut<'_, ()> {
        // Azurite has its own clock; cases poll until the message reappears.
        Box::pin(async {})
    }
}
