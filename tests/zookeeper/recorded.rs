//! Every node that a Zuul was seen to write can be read.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::zookeeper::support::Tree;

struct Node {
    path: String,
    bytes: Vec<u8>,
    holds: Value,
}

impl Node {
    fn is_part(&self) -> bool {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.len() == 10 && name.bytes().all(|byte| byte.is_ascii_digit())
    }
}

fn recorded() -> Vec<Node> {
    let lines = include_str!("../../fixtures/zookeeper/nodes.jsonl").lines();
    let nodes = lines.map(|line| {
        let node: Value = serde_json::from_str(line).expect("a line is JSON");
        let bytes = STANDARD.decode(node["base64"].as_str().expect("text")).expect("base64");
        Node { path: node["path"].as_str().expect("a path").to_owned(), bytes, holds: node["holds"].clone() }
    });
    nodes.collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_recorded_node_is_decoded() {
    let Some(tree) = Tree::new().await else { return };
    let is_ours = |node: &Node| node.path == "/zuul-system" || node.path.starts_with("/zuul/");
    let nodes: Vec<Node> = recorded().into_iter().filter(is_ours).collect();
    for node in &nodes {
        tree.session.ensure(&node.path).await.expect("it is made");
        if !node.bytes.is_empty() {
            tree.session.set(&node.path, &node.bytes, None).await.expect("it is written");
        }
    }
    let mut large = 0;
    for node in nodes.iter().filter(|node| !node.is_part()) {
        let found = tree.session.decode(&node.path).await.expect("it is answered").expect("it is there");
        if node.path == "/zuul/system/conf" {
            // Three shards, each compressed alone, as before model API 31.
            large = found.data["padding"].as_str().expect("its data").len();
        } else {
            assert_eq!(found.data, node.holds, "{}", node.path);
        }
    }
    assert_eq!(large, 2_100_000);
    let read = tree.session.read_shards("/zuul/system/conf").await.expect("they are read").expect("they are there");
    assert_eq!(serde_json::from_slice::<Value>(&read).expect("JSON"), json!({ "padding": "x".repeat(large) }));
}
