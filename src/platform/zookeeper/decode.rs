//! Reads a node as Zuul writes them: JSON, compressed or not, sharded, or behind the name of a class.

use serde_json::{Value, json};

use super::client::Stat;
use super::job_queue::JobError;
use super::shards::decompress;
use super::{Error, Session};
use journeyman_domain::limits::{ZOOKEEPER_NODE_BYTES_MAX, ZOOKEEPER_SHARDED_BYTES_MAX};

/// The first byte of a zlib stream: a folder of other sequential nodes is no sharded node.
const ZLIB: u8 = 0x78;

/// A node with its data.
#[derive(Debug)]
pub struct Decoded {
    /// Its stat.
    pub stat: Stat,
    /// Its data: JSON, or text, or what is wrong with them.
    pub data: Value,
    /// The paths that its data name.
    pub points_to: Vec<String>,
}

impl Session {
    /// Reads a node and decodes it; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// See [`JobError`]. Data that cannot be decoded are no error.
    pub async fn decode(&self, path: &str) -> Result<Option<Decoded>, JobError> {
        let Some((bytes, stat)) = self.get(path).await? else { return Ok(None) };
        let first = if bytes.is_empty() { self.get(&format!("{path}/{:010}", 0)).await? } else { None };
        let data = if first.is_some_and(|(shard, _)| shard.first() == Some(&ZLIB)) {
            match self.read_shards(path).await {
                Ok(data) => data.map_or(Value::Null, |data| text_or_json(&data)),
                Err(error) => unreadable(&JobError::from(error).to_string()),
            }
        } else if let Some((last, first)) = expandable_head(&bytes) {
            self.expand(path, first, last).await?
        } else {
            plain(path, &bytes)
        };
        let mut points_to = Vec::new();
        collect_paths(&data, &mut points_to);
        Ok(Some(Decoded { stat, data, points_to }))
    }

    async fn expand(&self, path: &str, first: &[u8], last: u32) -> Result<Value, Error> {
        let mut shards = vec![first.to_vec()];
        for number in (1..=last).take(ZOOKEEPER_SHARDED_BYTES_MAX / ZOOKEEPER_NODE_BYTES_MAX) {
            let Some((shard, _)) = self.get(&format!("{path}/{number:010}")).await? else { break };
            shards.push(shard);
        }
        Ok(decompress(path, &shards).map_or_else(|error| unreadable(&error.to_string()), |data| text_or_json(&data)))
    }
}

/// The number of the last shard and the first shard, which stands behind a head of class, compression and that number.
fn expandable_head(node: &[u8]) -> Option<(u32, &[u8])> {
    let mut parts = node.splitn(4, |byte| *byte == 0).skip(2);
    let (last, first) = (parts.next()?, parts.next()?);
    Some((std::str::from_utf8(last).ok()?.parse().ok()?, first))
}

fn unreadable(why: &str) -> Value {
    json!({ "unreadable": why })
}

/// JSON, or compressed JSON, with the name of a class before it or without.
fn plain(path: &str, bytes: &[u8]) -> Value {
    if bytes.is_empty() {
        return Value::Null;
    }
    let behind_class = bytes.iter().position(|byte| *byte == 0).and_then(|end| bytes.get(end + 1..));
    for compressed in [Some(bytes), behind_class].into_iter().flatten() {
        if let Ok(data) = decompress(path, &[compressed.to_vec()]) {
            return text_or_json(&data);
        }
    }
    text_or_json(bytes)
}

fn text_or_json(bytes: &[u8]) -> Value {
    if let Ok(json) = serde_json::from_slice(bytes) {
        return json;
    }
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => json!({ "bytes": bytes.len() }),
    }
}

fn collect_paths(data: &Value, found: &mut Vec<String>) {
    match data {
        Value::String(text)
            if text.starts_with('/') && !text.contains(|char: char| char.is_whitespace() || char.is_control()) =>
        {
            found.push(text.clone())
        }
        Value::Array(items) => items.iter().for_each(|item| collect_paths(item, found)),
        Value::Object(fields) => fields.values().for_each(|value| collect_paths(value, found)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
