//! The same of a cluster, where a worker is called otherwise than it was started: what was started is a promise at first.

use std::collections::BTreeSet;

use serde_json::Value;

use super::real::StandIn;
use super::*;

const TOKEN: &str = "the-token";

/// Everybody, as the changes say.
#[derive(Debug, Default)]
struct Known {
    up: BTreeMap<String, Key>,
    promised: BTreeMap<String, Key>,
    told: BTreeSet<String>,
    ended: BTreeMap<String, (End, bool)>,
}

impl Known {
    fn take(&mut self, change: Change) {
        match change {
            Change::Found { id, key } => drop(self.up.insert(id, key)),
            Change::Promised { id, key } => drop(self.promised.insert(id, key)),
            Change::Kept { id } => assert!(self.promised.remove(&id).is_some(), "{id} was promised"),
            Change::Going { .. } => {}
            Change::Ended { id, end, told, .. } => {
                assert!(self.up.remove(&id).is_some(), "{id} was there: {end:?}");
                self.ended.insert(id, (end, told));
            }
        }
    }

    fn keys(&self) -> BTreeSet<&str> {
        self.up.values().map(Key::as_str).collect()
    }

    async fn looks(&mut self, site: &mut Site, what: &str, like: impl Fn(&Self) -> bool) {
        let looking = async {
            while !like(self) {
                for change in site.looks().await {
                    self.take(change);
                }
            }
        };
        let seen = timeout(LONGEST, looking).await;
        assert!(seen.is_ok(), "{what}: {self:?}");
    }

    /// Has one started, and answers with why not.
    async fn start(&mut self, site: &mut Site, assignment: Assignment) -> Result<(), Trouble> {
        let (id, key) = (assignment.id.clone(), assignment.key.clone());
        assert!(site.line.start(assignment));
        loop {
            match site.news().await {
                News::Started(_) => {
                    self.promised.insert(id, key);
                    return Ok(());
                }
                News::Refused { why, .. } => return Err(why),
                News::Looked { changes, .. } => changes.expect("it can say").into_iter().for_each(|one| self.take(one)),
            }
        }
    }

    /// Tells everybody to go who was not told yet.
    fn stop_all(&mut self, site: &Site) {
        for id in self.up.keys().chain(self.promised.keys()) {
            if self.told.insert(id.clone()) {
                assert!(site.line.stop(id));
            }
        }
    }
}

fn cluster(place: &Place, port: &str, scaling: Scaling) -> Means {
    let token_file = place.path().join("token");
    std::fs::write(&token_file, format!("{TOKEN}\n")).expect("it is written");
    Means::Kubernetes(Box::new(Cluster {
        server: format!("http://127.0.0.1:{port}"),
        namespace: "here".to_owned(),
        token_file: Some(token_file),
        ca_file: None,
        image: "worker:1".to_owned(),
        command: Vec::new(),
        service_account: None,
        template: Some(serde_json::json!({ "spec": { "containers": [{ "resources": { "limits": { "cpu": 1 } } }] } })),
        scaling,
    }))
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_cluster_are_a_driver() {
    let place = Place::new();
    let worker = place.path().join("worker").display().to_string();
    let (_stand_in, port) = StandIn::start("kubernetes", &[TOKEN, "/bin/sh", &worker]);
    let means = cluster(&place, &port, Scaling::Own);
    let (core, other) = (place.posting("core", means.clone()), place.posting("core-2", means));
    let (mut site, mut stranger, mut known) = (Site::new(&core), Site::new(&other), Known::default());
    assert_eq!(site.looks().await, [], "nobody is there");

    // Two of a key are two pods of one Deployment; any key can be had.
    let mut texts = vec!["lives", "lives", "", "-", "Ü/ %2d.", "a=b\u{1}\"$`\\'\n"];
    let long = "é".repeat(120);
    texts.push(&long);
    for text in &texts {
        known.start(&mut site, assignment(&place, text)).await.expect("it is started");
    }
    known.looks(&mut site, "they are up", |known| known.up.len() == 7 && known.promised.is_empty()).await;
    assert_eq!(known.keys(), texts.iter().copied().collect());
    for (id, key) in &known.up {
        is_up(&place, &Assignment { id: id.clone(), key: key.clone(), variables: BTreeMap::new() }).await;
    }

    // The next controller finds each, wherever it runs, and those of another pool are none of its business.
    drop(site);
    let mut site = Site::new(&core);
    let mut again = Known::default();
    again.looks(&mut site, "they are found", |again| again.up == known.up).await;
    assert_eq!(stranger.looks().await, []);

    // One that is told to go goes, and no other.
    let idle = known.up.iter().find(|(_, key)| key.as_str() == "lives").map(|(id, _)| id.clone()).expect("one");
    assert!(site.line.stop(&idle));
    known.looks(&mut site, "it goes", |known| known.ended.contains_key(&idle)).await;
    assert!(known.ended[&idle].1 && known.up.len() == 6 && known.promised.is_empty(), "{known:?}");
    assert_eq!(site.looks().await, []);

    // One that does not is killed.
    known.start(&mut site, assignment(&place, "stays")).await.expect("it is started");
    let stays = |known: &Known| known.up.iter().find(|(_, key)| key.as_str() == "stays").map(|(id, _)| id.clone());
    known.looks(&mut site, "it is up", |known| stays(known).is_some()).await;
    let id = stays(&known).expect("it is up");
    is_up(&place, &Assignment { id: id.clone(), key: key("stays"), variables: BTreeMap::new() }).await;
    assert!(site.line.stop(&id));
    known.looks(&mut site, "it is killed", |known| known.ended.contains_key(&id)).await;
    assert!(known.ended[&id].1, "{known:?}");

    // What the cluster refuses is said; what it evicts as well, with its status and its last words.
    let Err(Trouble(why)) = known.start(&mut site, assignment(&place, "cannot")).await else { panic!("it is refused") };
    assert!(why.contains("exceeded quota"), "{why}");
    known.ended.clear();
    known.start(&mut site, assignment(&place, "dies")).await.expect("it is started");
    known.looks(&mut site, "it is evicted", |known| !known.ended.is_empty()).await;
    let (end, told) = known.ended.values().next().expect("one");
    assert!(end.how.contains("exit status: 3") && end.last_words.contains("goodbye") && !told, "{end:?}");

    // In the end nobody is left, and no Deployment either.
    let ending = async {
        while !known.up.is_empty() || !known.promised.is_empty() {
            known.stop_all(&site);
            for change in site.looks().await {
                known.take(change);
            }
        }
    };
    assert!(timeout(LONGEST, ending).await.is_ok(), "{known:?}");
    for (path, kind) in [("apis/apps/v1", "deployments"), ("api/v1", "secrets")] {
        assert_eq!(objects(&port, path, kind).await, Vec::<Value>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_keda_a_group_is_a_deployment_that_it_scales_by_its_queue() {
    let place = Place::new();
    let (_stand_in, port) = StandIn::start("kubernetes", &[TOKEN, "/bin/true"]);
    let scaling = Scaling::Keda { least: 1, most: 5, per_worker: 2 };
    let core = place.posting("core", cluster(&place, &port, scaling));
    let mut site = Site::new(&core);
    let mut group = assignment(&place, "a b");
    group.variables.insert("WORKER_REQUESTS_QUEUE".to_owned(), "core-req-a%20b".to_owned());
    site.starts(group.clone()).await.expect("it is made");
    assert_eq!(site.looks().await, []);
    let scaled = objects(&port, "apis/keda.sh/v1alpha1", "scaledobjects").await.pop().expect("one");
    let trigger = &scaled["spec"]["triggers"][0]["metadata"];
    assert_eq!((&trigger["queueName"], &trigger["value"]), (&"core-req-a%20b".into(), &"2".into()), "{scaled}");
    assert_eq!((&scaled["spec"]["minReplicaCount"], &scaled["spec"]["maxReplicaCount"]), (&1.into(), &5.into()));
    assert_eq!(scaled["spec"]["scaleTargetRef"]["name"], "jm--core--a-20b");
    drop(site);
    let mut site = Site::new(&core);
    assert_eq!(site.looks().await, [Change::Found { id: group.id.clone(), key: group.key.clone() }]);
    assert!(site.line.stop(&group.id));
    site.ends(&group.id, true).await;
    for (path, kind) in [
        ("apis/apps/v1", "deployments"),
        ("api/v1", "secrets"),
        ("apis/keda.sh/v1alpha1", "scaledobjects"),
        ("apis/keda.sh/v1alpha1", "triggerauthentications"),
    ] {
        assert_eq!(objects(&port, path, kind).await, Vec::<Value>::new());
    }
}

/// What the stand-in has of a kind.
async fn objects(port: &str, path: &str, kind: &str) -> Vec<Value> {
    let label = "labelSelector=app.kubernetes.io/managed-by%3Djourneyman";
    let url = format!("http://127.0.0.1:{port}/{path}/namespaces/here/{kind}?{label}");
    let answer = reqwest::Client::new().get(url).bearer_auth(TOKEN).send().await.expect("it answers");
    let list: Value = serde_json::from_slice(&answer.bytes().await.expect("all of it")).expect("JSON");
    list["items"].as_array().cloned().expect("a list")
}
