//! Data that may be larger than a node: one zlib stream of JSON, cut into children that are numbered in its order.
//!
//! Neither write nor removal is atomic: another node has to say that the data is complete. Zuul's `ShardedZKObject` and
//! `RawShardIO` read and write the same. Clusters whose oldest member is before model API 31 compress each shard alone; both
//! are read.

use std::io::{Read as _, Write as _};

use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;

use super::client::CreateMode;
use super::{Error, Session};
use journeyman_domain::limits::{ZOOKEEPER_NODE_BYTES_MAX, ZOOKEEPER_SHARDED_BYTES_MAX};

/// Why sharded data cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// A call failed.
    #[error(transparent)]
    Call(#[from] Error),
    /// It is not compressed, or cut off.
    #[error("the shards of {path} are not one zlib stream, nor is each: {source}")]
    NotCompressed {
        /// The node.
        path: String,
        /// What the decompressor said.
        source: std::io::Error,
    },
    /// It is over the limit.
    #[error("the data of {0} has more than {ZOOKEEPER_SHARDED_BYTES_MAX} bytes")]
    TooLarge(String),
}

impl Session {
    /// Replaces the sharded data of a node.
    ///
    /// # Errors
    ///
    /// See [`ShardError`].
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: a part may have been written. Repeating it is safe.
    pub async fn write_shards(&self, path: &str, data: &[u8]) -> Result<(), ShardError> {
        let compressed = compress(path, data)?;
        self.delete_tree(path).await?;
        self.ensure(path).await?;
        for (number, shard) in compressed.chunks(ZOOKEEPER_NODE_BYTES_MAX).enumerate() {
            self.create(&format!("{path}/{number:010}"), shard, CreateMode::Persistent).await?;
        }
        Ok(())
    }

    /// Reads the sharded data of a node; `None` if it has none.
    ///
    /// # Errors
    ///
    /// See [`ShardError`].
    pub async fn read_shards(&self, path: &str) -> Result<Option<Vec<u8>>, ShardError> {
        // Most have one shard, which is asked for at once.
        let first = format!("{path}/{FIRST_SHARD}");
        let (names, first) = tokio::join!(self.children(path), self.get(&first));
        let Some(mut names) = names?.filter(|names| !names.is_empty()) else { return Ok(None) };
        names.sort_unstable();
        if names.len() > ZOOKEEPER_SHARDED_BYTES_MAX / ZOOKEEPER_NODE_BYTES_MAX {
            return Err(ShardError::TooLarge(path.to_owned()));
        }
        let (mut first, mut shards) = (first?, Vec::with_capacity(names.len()));
        for name in &names {
            let read = match first.take().filter(|_| name == FIRST_SHARD) {
                None => self.get(&format!("{path}/{name}")).await?,
                read => read,
            };
            let Some((shard, _)) = read else { return Ok(None) };
            shards.push(shard);
        }
        decompress(path, &shards).map(Some)
    }
}

/// The name of the first shard.
pub(super) const FIRST_SHARD: &str = "0000000000";

/// The stream that shards are cut from.
pub(super) fn compress(path: &str, data: &[u8]) -> Result<Vec<u8>, ShardError> {
    if data.len() > ZOOKEEPER_SHARDED_BYTES_MAX {
        return Err(ShardError::TooLarge(path.to_owned()));
    }
    let not_compressed = |source| ShardError::NotCompressed { path: path.to_owned(), source };
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(data).map_err(not_compressed)?;
    encoder.finish().map_err(not_compressed)
}

/// The data of shards that are one stream, or a stream each.
pub(crate) fn decompress(path: &str, shards: &[Vec<u8>]) -> Result<Vec<u8>, ShardError> {
    match inflate(path, &shards.concat()) {
        Ok(data) => Ok(data),
        Err(ShardError::NotCompressed { .. }) => {
            let parts: Vec<Vec<u8>> = shards.iter().map(|shard| inflate(path, shard)).collect::<Result<_, _>>()?;
            let data = parts.concat();
            if data.len() > ZOOKEEPER_SHARDED_BYTES_MAX { Err(ShardError::TooLarge(path.to_owned())) } else { Ok(data) }
        }
        Err(error) => Err(error),
    }
}

/// The whole input has to be one stream.
fn inflate(path: &str, compressed: &[u8]) -> Result<Vec<u8>, ShardError> {
    let mut data = Vec::new();
    let mut decoder = ZlibDecoder::new(compressed);
    let limit = ZOOKEEPER_SHARDED_BYTES_MAX as u64 + 1;
    let not_compressed = |source| ShardError::NotCompressed { path: path.to_owned(), source };
    (&mut decoder).take(limit).read_to_end(&mut data).map_err(not_compressed)?;
    if data.len() > ZOOKEEPER_SHARDED_BYTES_MAX {
        return Err(ShardError::TooLarge(path.to_owned()));
    }
    if decoder.total_in() != compressed.len() as u64 {
        return Err(not_compressed(std::io::ErrorKind::InvalidData.into()));
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compress(data: &[u8]) -> Vec<u8> {
        super::compress("/x", data).unwrap()
    }

    #[test]
    fn one_stream_in_several_shards_and_a_stream_in_each_are_read() {
        let whole = compress(b"{\"merged\": true}");
        let (head, tail) = whole.split_at(whole.len() / 2);
        assert_eq!(decompress("/x", &[head.to_vec(), tail.to_vec()]).unwrap(), b"{\"merged\": true}");
        let alone = [compress(b"{\"merged\": "), compress(b"true}")];
        assert_eq!(decompress("/x", &alone).unwrap(), b"{\"merged\": true}");
    }

    #[test]
    fn what_is_cut_off_or_no_stream_at_all_is_an_error_that_names_its_node() {
        let whole = compress(b"{\"merged\": true}");
        for bad in [whole[..whole.len() - 4].to_vec(), b"{}".to_vec()] {
            let error = decompress("/zuul/merger/params/a", &[bad]).unwrap_err();
            assert!(error.to_string().contains("/zuul/merger/params/a"), "{error}");
        }
    }
}
