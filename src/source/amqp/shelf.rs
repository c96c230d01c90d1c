//! Requests that were acknowledged before their answer, on the disk of this host: each whole, with its properties, in a file of
//! its own, until its answer is confirmed.
//!
//! Apart from the worker's journal, which is written anew from memory and holds no payloads: a request may have as many bytes
//! as the broker takes. A file is there whole or not at all, and says by a checksum whether it still is what was written.
//!
//! ```text
//! journeyman request 1 SHA-256 of what follows
//! {"broker": "amqp://…", "queue": "…", "attempts": 1, "since": …, "properties": {…}}
//! the body
//! ```
//!
//! What one is called says whether it was handed back, and waits for room in its queue.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::BasicProperties;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tokio::sync::Notify;

use crate::host::clock;
use crate::host::crash_points::{crash, crash_due, crash_point};
use crate::limits::{SHELF_BYTES_MAX, SHELF_HEAD_BYTES_MAX, SHELF_REQUESTS_MAX};

use super::lock;

/// What the first line begins with.
const MARK: &str = "journeyman request 1 ";
/// What a file is called that is whole.
const WHOLE: &str = "request";
/// What follows in the name of one that was handed back, before how often it was tried.
const BACK: &str = ".back-";
/// What one is called that is being written.
const PART: &str = "part";
/// What one is called that is not what was written.
const DAMAGED: &str = "damaged";

/// Where they are.
pub(super) struct Shelf {
    folder: PathBuf,
    broker: String,
    queue: String,
    /// How many of them are being worked at.
    held: AtomicU16,
    /// What is to be done about some that nobody works at any more.
    left: Mutex<VecDeque<Left>>,
    told: Notify,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Entry(PathBuf);

impl std::fmt::Display for Entry {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(out)
    }
}

impl Entry {
    /// With how many attempts it goes back to its queue; `None` where nobody has handed it back.
    pub(super) fn returning(&self) -> Option<u32> {
        self.0.file_stem()?.to_str()?.rsplit_once(BACK)?.1.parse().ok()
    }
}

/// What is to be done about one that nobody works at any more.
pub(super) enum Left {
    /// The broker has it: it goes, once it is written.
    Unneeded(Entry, Option<Writing>),
    /// It is here and nowhere else, and was cut short.
    Interrupted(Entry),
    /// It is here and nowhere else, and was handed back: it goes to its queue with so many attempts, once there is room.
    Returning(Entry, u32),
}

/// A request that is being written.
pub(super) type Writing = tokio::task::JoinHandle<io::Result<()>>;

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Shelved {
    /// How often it was tried, the time included that was interrupted.
    pub(super) attempts: u32,
    /// When it was handed to us, as a time since 1970.
    pub(super) since: Duration,
    pub(super) properties: BasicProperties,
    pub(super) body: Arc<[u8]>,
}

impl Shelved {
    /// For how long we have had it, as far as nobody has set the clock meanwhile.
    pub(super) fn held(&self) -> Duration {
        clock::unix_time().saturating_sub(self.since)
    }
}

#[derive(Serialize, Deserialize)]
struct Head {
    broker: String,
    queue: String,
    attempts: u32,
    /// In milliseconds since 1970; earlier versions do not say it.
    since: Option<u64>,
    properties: BasicProperties,
}

/// Why a file says nothing.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unread {
    /// It is about another queue.
    #[error("it is of {0}")]
    Elsewhere(String),
    /// It is not what was written.
    #[error("it is damaged")]
    Damaged,
    /// It cannot be read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl Shelf {
    pub(super) fn new(folder: &Path, broker: &str, queue: &str) -> Self {
        Self {
            folder: folder.to_owned(),
            broker: broker.to_owned(),
            queue: queue.to_owned(),
            held: AtomicU16::new(0),
            left: Mutex::default(),
            told: Notify::new(),
        }
    }

    /// One is being worked at: it has a slot, and no channel counts it.
    pub(super) fn hold(&self) {
        self.held.fetch_add(1, Ordering::AcqRel);
    }

    /// One is worked at no more.
    pub(super) fn release(&self) {
        self.held.fetch_sub(1, Ordering::AcqRel);
    }

    /// How many are being worked at.
    pub(super) fn held(&self) -> u16 {
        self.held.load(Ordering::Acquire)
    }

    /// Removes one, which is said where it fails.
    pub(super) async fn clear(self: &Arc<Self>, entry: Entry) {
        let (shelf, gone) = (Arc::clone(self), entry.clone());
        let removed = tokio::task::spawn_blocking(move || shelf.remove(&gone)).await;
        if let Err(error) = removed.map_err(io::Error::other).and_then(|removed| removed) {
            tracing::error!(file = %entry, %error, "a request that is done with cannot be removed; the next life does it once more");
        }
    }

    /// A place for one more.
    pub(super) fn entry(&self) -> Entry {
        Entry(self.folder.join(format!("{}.{WHOLE}", uuid::Uuid::new_v4().simple())))
    }

    /// Writes a request. When this returns it is on the disk, or nothing is.
    ///
    /// # Errors
    ///
    /// Where it cannot be written, or would be read otherwise than it is, or where there are too many.
    pub(super) fn write(&self, entry: &Entry, request: &Shelved) -> io::Result<()> {
        let bytes = self.bytes(request)?;
        if !self.folder.is_dir() {
            std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
            sync(self.folder.parent().unwrap_or(&self.folder))?;
        }
        self.has_room(bytes.len() as u64 + request.body.len() as u64)?;
        let part = entry.0.with_extension(PART);
        let written = self.write_out(&part, entry, &bytes, &request.body);
        if written.is_err() {
            // A disk that is full is the fuller for it.
            drop(std::fs::remove_file(&part));
        }
        written
    }

    fn write_out(&self, part: &Path, entry: &Entry, head: &[u8], body: &[u8]) -> io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(part)?;
        file.write_all(head)?;
        if crash_due("shelf-torn-write") {
            drop(file.write_all(body.get(..body.len() / 2).unwrap_or_default()));
            crash();
        }
        file.write_all(body)?;
        crash_point("shelf-before-sync");
        file.sync_all()?;
        crash_point("shelf-before-rename");
        std::fs::rename(part, &entry.0)?;
        sync(&self.folder)?;
        crash_point("shelf-written");
        Ok(())
    }

    /// What comes before the body.
    fn bytes(&self, request: &Shelved) -> io::Result<Vec<u8>> {
        let head = Head {
            broker: self.broker.clone(),
            queue: self.queue.clone(),
            attempts: request.attempts,
            since: u64::try_from(request.since.as_millis()).ok(),
            properties: request.properties.clone(),
        };
        let mut line = serde_json::to_vec(&head)?;
        // Not everything that a message may say can be said in JSON, such as a number that is none.
        let read: Option<Head> = serde_json::from_slice(&line).ok();
        if read.is_none_or(|read| read.properties != request.properties) || line.len() > SHELF_HEAD_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its headers cannot be written down"));
        }
        line.push(b'\n');
        let mut bytes = format!("{MARK}{}\n", sum(&line, &request.body)).into_bytes();
        bytes.append(&mut line);
        Ok(bytes)
    }

    fn has_room(&self, more: u64) -> io::Result<()> {
        let (mut count, mut bytes) = (0, more);
        for entry in std::fs::read_dir(&self.folder)? {
            count += 1;
            bytes += entry?.metadata().map_or(0, |about| about.len());
        }
        if count >= SHELF_REQUESTS_MAX || bytes > SHELF_BYTES_MAX {
            let text = format!("{} holds as much as it may ({count} requests)", self.folder.display());
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
        Ok(())
    }

    /// Writes down of one that it was handed back after so many attempts. Answers with where it is then.
    ///
    /// # Errors
    ///
    /// Where its name cannot be changed; a later life takes it for one that was interrupted.
    pub(super) fn hand_back(&self, entry: &Entry, attempts: u32) -> io::Result<Entry> {
        let stem = entry.0.file_stem().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
        let back = self.folder.join(format!("{stem}{BACK}{attempts}.{WHOLE}"));
        match std::fs::rename(&entry.0, &back) {
            Ok(()) => {}
            // A call before this one was given up after it had done so.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.handed_back(stem)?.ok_or(error),
            Err(error) => return Err(error),
        }
        sync(&self.folder)?;
        Ok(Entry(back))
    }

    fn handed_back(&self, stem: &str) -> io::Result<Option<Entry>> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = Entry(entry?.path());
            let name = entry.0.file_name().and_then(std::ffi::OsStr::to_str).unwrap_or_default();
            if name.strip_prefix(stem).is_some_and(|rest| rest.starts_with(BACK)) {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// Removes one. One that is not there is removed.
    ///
    /// # Errors
    ///
    /// Where it cannot be; it is answered once more then, by the next life.
    pub(super) fn remove(&self, entry: &Entry) -> io::Result<()> {
        match std::fs::remove_file(&entry.0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// What an earlier life has left, in the order of their names. What it was still writing when it ended is removed: its
    /// broker was not told that it is done with.
    ///
    /// # Errors
    ///
    /// Where the folder cannot be read.
    pub(super) fn left_over(&self) -> io::Result<Vec<Entry>> {
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let path = entry?.path();
            match path.extension().and_then(std::ffi::OsStr::to_str) {
                Some(WHOLE) => found.push(Entry(path)),
                Some(PART) => std::fs::remove_file(&path)?,
                Some(_) | None => {}
            }
        }
        found.sort();
        Ok(found)
    }

    /// Reads one.
    ///
    /// # Errors
    ///
    /// [`Unread`].
    pub(super) fn read(&self, entry: &Entry) -> Result<Shelved, Unread> {
        let mut bytes = Vec::new();
        File::open(&entry.0)?.take(SHELF_BYTES_MAX).read_to_end(&mut bytes)?;
        let Content { head, body } = content(&bytes).ok_or(Unread::Damaged)?;
        if head.broker != self.broker || head.queue != self.queue {
            return Err(Unread::Elsewhere(format!("queue {} at {}", head.queue, head.broker)));
        }
        let since = head.since.map_or_else(clock::unix_time, Duration::from_millis);
        Ok(Shelved { attempts: head.attempts, since, properties: head.properties, body: body.into() })
    }

    /// Puts one that is not what was written where nobody takes it for a request.
    pub(super) fn put_aside(&self, entry: &Entry) {
        if let Err(error) = std::fs::rename(&entry.0, entry.0.with_extension(DAMAGED)) {
            tracing::debug!(%error, "a damaged request cannot be put aside");
        }
    }

    /// Leaves word of one that nobody works at any more.
    pub(super) fn leave(&self, left: Left) {
        lock(&self.left).push_back(left);
        self.told.notify_one();
    }

    /// Takes the next word, where there is one.
    pub(super) fn next(&self) -> Option<Left> {
        lock(&self.left).pop_front()
    }

    /// Resolves when there may be word.
    pub(super) async fn told(&self) {
        self.told.notified().await;
    }
}

struct Content<'a> {
    head: Head,
    body: &'a [u8],
}

fn content(bytes: &[u8]) -> Option<Content<'_>> {
    let rest = bytes.strip_prefix(MARK.as_bytes())?;
    let end = rest.iter().position(|byte| *byte == b'\n')?;
    let (found, rest) = (rest.get(..end)?, rest.get(end + 1..)?);
    let end = rest.iter().position(|byte| *byte == b'\n')? + 1;
    let (line, body) = rest.split_at_checked(end)?;
    if found != sum(line, body).as_bytes() {
        return None;
    }
    Some(Content { head: serde_json::from_slice(line).ok()?, body })
}

fn sum(line: &[u8], body: &[u8]) -> String {
    let digest = Sha256::new().chain_update(line).chain_update(body).finalize();
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use lapin::types::{AMQPValue, FieldTable};
    use proptest::prelude::*;

    use super::*;

    fn properties(value: AMQPValue) -> BasicProperties {
        let mut headers = FieldTable::default();
        headers.insert("header".into(), value);
        BasicProperties::default()
            .with_headers(headers)
            .with_reply_to("amq.rabbitmq.reply-to.g1h2".into())
            .with_correlation_id("é\n\"".into())
            .with_expiration("1500".into())
            .with_timestamp(7)
            .with_priority(3)
    }

    fn shelved(value: AMQPValue, body: &[u8]) -> Shelved {
        let since = Duration::from_millis(1_700_000_000_123);
        Shelved { attempts: 2, since, properties: properties(value), body: body.into() }
    }

    fn shelf(folder: &Path) -> Shelf {
        Shelf::new(&folder.join("requests"), "amqp://host:5672/%2F", "core-req-42")
    }

    #[test]
    fn a_request_is_read_as_it_was_written_whatever_its_headers_are() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = shelf(folder.path());
        let mut table = FieldTable::default();
        table.insert("inner".into(), AMQPValue::Double(0.1));
        for value in [
            AMQPValue::ByteArray(vec![0, 255].into()),
            AMQPValue::LongString(vec![255, 254].into()),
            AMQPValue::ShortString("short".into()),
            AMQPValue::LongLongInt(i64::MIN),
            AMQPValue::Timestamp(u64::MAX),
            AMQPValue::Float(f32::MIN_POSITIVE),
            AMQPValue::Boolean(true),
            AMQPValue::Void,
            AMQPValue::FieldArray(vec![AMQPValue::FieldTable(table.clone()), AMQPValue::Void].into()),
            AMQPValue::FieldTable(table),
        ] {
            for body in [&b""[..], b"\nbody\n", &[0xff; 100_000]] {
                let (entry, request) = (shelf.entry(), shelved(value.clone(), body));
                shelf.write(&entry, &request).unwrap();
                assert_eq!(shelf.read(&entry).unwrap(), request);
                let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
                assert_eq!((mode(&entry.0), mode(&shelf.folder)), (0o600, 0o700));
                shelf.remove(&entry).unwrap();
                shelf.remove(&entry).unwrap();
            }
        }
        assert_eq!(shelf.left_over().unwrap(), []);
    }

    #[test]
    fn what_cannot_be_written_down_as_it_is_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = shelf(folder.path());
        for odd in [AMQPValue::Double(f64::NAN), AMQPValue::Float(f32::INFINITY)] {
            let refused = shelf.write(&shelf.entry(), &shelved(odd, b"")).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        }
        assert_eq!(shelf.left_over().unwrap(), []);
    }

    #[test]
    fn one_that_was_handed_back_is_found_as_such() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = shelf(folder.path());
        let (entry, request) = (shelf.entry(), shelved(AMQPValue::Void, b"1"));
        shelf.write(&entry, &request).unwrap();
        assert_eq!(entry.returning(), None);
        let back = shelf.hand_back(&entry, 7).unwrap();
        assert_eq!(shelf.hand_back(&entry, 8).unwrap(), back, "once more");
        assert!(shelf.hand_back(&shelf.entry(), 1).is_err());
        let found = shelf.left_over().unwrap();
        assert_eq!(found.iter().map(Entry::returning).collect::<Vec<_>>(), [Some(7)]);
        assert_eq!(shelf.read(&found[0]).unwrap(), request);
    }

    #[test]
    fn what_was_left_is_found_and_what_was_half_written_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = shelf(folder.path());
        assert_eq!(shelf.left_over().unwrap(), [], "there is no folder yet");
        let (one, other) = (shelf.entry(), shelf.entry());
        shelf.write(&one, &shelved(AMQPValue::Void, b"1")).unwrap();
        shelf.write(&other, &shelved(AMQPValue::Void, b"2")).unwrap();
        std::fs::write(shelf.folder.join("x.part"), "half").unwrap();
        let mut both = vec![one.clone(), other];
        both.sort();
        assert_eq!(shelf.left_over().unwrap(), both);
        assert!(!shelf.folder.join("x.part").exists());
        shelf.put_aside(&one);
        assert_eq!(shelf.left_over().unwrap().len(), 1);
        assert!(one.0.with_extension("damaged").exists());
    }

    #[test]
    fn a_request_of_another_queue_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, entry) = (shelf(folder.path()), shelf(folder.path()).entry());
        ours.write(&entry, &shelved(AMQPValue::Void, b"1")).unwrap();
        let theirs = Shelf::new(&ours.folder, "amqp://host:5672/%2F", "another");
        assert!(matches!(theirs.read(&entry), Err(Unread::Elsewhere(of)) if of.contains("core-req-42")));
    }

    #[test]
    fn what_is_not_written_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let shelf = shelf(folder.path());
        // Where its folder is to be there is a file.
        std::fs::write(&shelf.folder, "").unwrap();
        assert!(shelf.write(&shelf.entry(), &shelved(AMQPValue::Void, b"1")).is_err());
        std::fs::remove_file(&shelf.folder).unwrap();
        // What it holds already is all that it may.
        std::fs::create_dir(&shelf.folder).unwrap();
        let big = File::create(shelf.folder.join("big.request")).unwrap();
        big.set_len(SHELF_BYTES_MAX).unwrap();
        let refused = shelf.write(&shelf.entry(), &shelved(AMQPValue::Void, b"1")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        assert_eq!(shelf.left_over().unwrap().len(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn a_file_that_was_changed_anywhere_is_damaged(at in any::<proptest::sample::Index>(), byte in any::<u8>()) {
            let folder = tempfile::tempdir().unwrap();
            let shelf = shelf(folder.path());
            let entry = shelf.entry();
            shelf.write(&entry, &shelved(AMQPValue::Boolean(true), b"the body")).unwrap();
            let mut bytes = std::fs::read(&entry.0).unwrap();
            let at = at.index(bytes.len());
            prop_assume!(bytes[at] != byte);
            bytes[at] = byte;
            std::fs::write(&entry.0, &bytes).unwrap();
            prop_assert!(matches!(shelf.read(&entry), Err(Unread::Damaged)));
            std::fs::write(&entry.0, &bytes[..at]).unwrap();
            prop_assert!(matches!(shelf.read(&entry), Err(Unread::Damaged)));
        }

        #[test]
        fn no_bytes_are_too_odd_to_be_read(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert!(content(&bytes).is_none());
        }
    }
}
