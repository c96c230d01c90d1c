//! The records of the protocol: what each operation sends, and how its answer is read.

use std::time::Duration;

use bytes::BufMut as _;

use super::jute::{Malformed, Reader, put_bytes, put_flag, put_length};
use super::path::NodePath;

/// The number of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum Operation {
    Create = 1,
    Delete = 2,
    Exists = 3,
    GetData = 4,
    SetData = 5,
    Ping = 11,
    GetChildren = 12,
    Multi = 14,
    RemoveWatches = 18,
    Auth = 100,
    SetWatches = 105,
    AddWatch = 106,
    Close = -11,
}

/// Numbers that requests and answers have which are no calls.
pub(super) mod xid {
    pub(in super::super) const EVENT: i32 = -1;
    pub(in super::super) const PING: i32 = -2;
    pub(in super::super) const AUTH: i32 = -4;
    pub(in super::super) const SET_WATCHES: i32 = -8;
}

const ERROR: i32 = -1;
const ANY_VERSION: i32 = -1;
const RECURSIVE: i32 = 1;
const ANY_WATCH: i32 = 3;

/// How long a node lives, and whether it gets a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum CreateMode {
    /// Exists until it is deleted.
    Persistent = 0,
    /// Exists as long as its session.
    Ephemeral = 1,
    /// Exists until it is deleted; the server appends a number of ten digits.
    PersistentSequential = 2,
    /// As long as its session; the server appends a number of ten digits.
    EphemeralSequential = 3,
}

/// Who may do what with a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acl {
    /// Everybody may do everything.
    AnyoneAll,
    /// Everybody may read.
    AnyoneRead,
    /// Who has the credentials of the creator may do everything.
    CreatorAll,
}

/// What the server knows of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// The transaction that created it.
    pub czxid: i64,
    /// The transaction that changed its data last.
    pub mzxid: i64,
    /// Its time of creation, in milliseconds since 1970.
    pub ctime: i64,
    /// The time of the last change of its data, in milliseconds since 1970.
    pub mtime: i64,
    /// How often its data changed.
    pub version: i32,
    /// The session that it ends with; 0 for a persistent node.
    pub ephemeral_owner: i64,
    /// How many bytes its data have.
    pub data_length: i32,
    /// How many children it has.
    pub num_children: i32,
}

/// A write of a transaction.
#[derive(Debug, Clone, Copy)]
pub enum Write<'a> {
    /// Creates a node.
    Create {
        /// The path, which the number of a sequential node is appended to.
        path: &'a str,
        /// The data.
        data: &'a [u8],
        /// How long it lives.
        mode: CreateMode,
    },
    /// Sets data, of this version if one is given.
    Set {
        /// The path.
        path: &'a str,
        /// The data.
        data: &'a [u8],
        /// The version that it has to have.
        version: Option<i32>,
    },
    /// Deletes a node, of this version if one is given.
    Delete {
        /// The path.
        path: &'a str,
        /// The version that it has to have.
        version: Option<i32>,
    },
}

impl Write<'_> {
    /// The path of the node.
    pub const fn path(&self) -> &str {
        match self {
            Self::Create { path, .. } | Self::Set { path, .. } | Self::Delete { path, .. } => path,
        }
    }

    const fn operation(&self) -> Operation {
        match self {
            Self::Create { .. } => Operation::Create,
            Self::Set { .. } => Operation::SetData,
            Self::Delete { .. } => Operation::Delete,
        }
    }

    /// True if the server completes the path with a number.
    pub(super) const fn is_sequential(&self) -> bool {
        matches!(self, Self::Create { mode: CreateMode::PersistentSequential | CreateMode::EphemeralSequential, .. })
    }
}

/// A request, from its operation on.
pub(super) fn request(operation: Operation) -> Vec<u8> {
    (operation as i32).to_be_bytes().to_vec()
}

pub(super) fn write(write: Write<'_>, path: NodePath<'_>, acl: Acl) -> Vec<u8> {
    let mut out = request(write.operation());
    put_write(&mut out, write, path, acl);
    out
}

/// Reads of one node.
pub(super) fn read(operation: Operation, path: NodePath<'_>, watches: bool) -> Vec<u8> {
    let mut out = request(operation);
    path.put(&mut out);
    put_flag(&mut out, watches);
    out
}

pub(super) fn add_recursive_watch(path: NodePath<'_>) -> Vec<u8> {
    let mut out = request(Operation::AddWatch);
    path.put(&mut out);
    out.put_i32(RECURSIVE);
    out
}

pub(super) fn remove_watches(path: NodePath<'_>) -> Vec<u8> {
    let mut out = request(Operation::RemoveWatches);
    path.put(&mut out);
    out.put_i32(ANY_WATCH);
    out
}

/// Sets recursive watches again, after a session has got another connection.
pub(super) fn set_recursive_watches<'a>(last_zxid: i64, roots: impl ExactSizeIterator<Item = &'a str>) -> Vec<u8> {
    let mut out = request(Operation::SetWatches);
    out.put_i64(last_zxid);
    // One list each of data, existence, children, and persistent watches of one node.
    for _ in 0..4 {
        put_length(&mut out, 0);
    }
    put_length(&mut out, roots.len());
    for root in roots {
        put_bytes(&mut out, root.as_bytes());
    }
    out
}

pub(super) fn auth(scheme: &str, credentials: &[u8]) -> Vec<u8> {
    let mut out = request(Operation::Auth);
    out.put_i32(0);
    put_bytes(&mut out, scheme.as_bytes());
    put_bytes(&mut out, credentials);
    out
}

pub(super) fn multi<'a>(writes: impl Iterator<Item = (Write<'a>, NodePath<'a>)>) -> Vec<u8> {
    let mut out = request(Operation::Multi);
    let head = |out: &mut Vec<u8>, operation: i32, is_last: bool| {
        out.put_i32(operation);
        put_flag(out, is_last);
        out.put_i32(ERROR);
    };
    for (write, path) in writes {
        head(&mut out, write.operation() as i32, false);
        put_write(&mut out, write, path, Acl::AnyoneAll);
    }
    head(&mut out, ERROR, true);
    out
}

fn put_write(out: &mut Vec<u8>, write: Write<'_>, path: NodePath<'_>, acl: Acl) {
    path.put(out);
    match write {
        Write::Create { data, mode, .. } => {
            put_bytes(out, data);
            let (rights, scheme, id) = match acl {
                Acl::AnyoneAll => (31, "world", "anyone"),
                Acl::AnyoneRead => (1, "world", "anyone"),
                Acl::CreatorAll => (31, "auth", ""),
            };
            put_length(out, 1);
            out.put_i32(rights);
            put_bytes(out, scheme.as_bytes());
            put_bytes(out, id.as_bytes());
            out.put_i32(mode as i32);
        }
        Write::Set { data, version, .. } => {
            put_bytes(out, data);
            out.put_i32(version.unwrap_or(ANY_VERSION));
        }
        Write::Delete { version, .. } => out.put_i32(version.unwrap_or(ANY_VERSION)),
    }
}

pub(super) fn nothing(_: &mut Reader<'_>) -> Result<(), Malformed> {
    Ok(())
}

pub(super) fn stat(answer: &mut Reader<'_>) -> Result<Stat, Malformed> {
    let (czxid, mzxid, ctime, mtime) = (answer.long()?, answer.long()?, answer.long()?, answer.long()?);
    let version = answer.int()?;
    let (_child_version, _acl_version) = (answer.int()?, answer.int()?);
    let (ephemeral_owner, data_length, num_children) = (answer.long()?, answer.int()?, answer.int()?);
    let _last_child_zxid = answer.long()?;
    Ok(Stat { czxid, mzxid, ctime, mtime, version, ephemeral_owner, data_length, num_children })
}

pub(super) fn data(answer: &mut Reader<'_>) -> Result<(Vec<u8>, Stat), Malformed> {
    Ok((answer.bytes()?.to_vec(), stat(answer)?))
}

pub(super) fn children(answer: &mut Reader<'_>) -> Result<(Vec<String>, Stat), Malformed> {
    Ok((answer.texts()?, stat(answer)?))
}

/// The write of a transaction that failed, and its code; `None` if all are done.
pub(super) fn failed_write(answer: &mut Reader<'_>) -> Result<Option<(usize, i32)>, Malformed> {
    /// The code of the writes that another one kept from being done.
    const NOT_DONE: i32 = -2;
    let mut failed = None;
    for index in 0.. {
        let (kind, is_last, _) = (answer.int()?, answer.flag()?, answer.int()?);
        if is_last {
            break;
        }
        if kind == ERROR {
            let code = answer.int()?;
            if code != 0 && failed.is_none_or(|(_, earlier)| earlier == NOT_DONE) {
                failed = Some((index, code));
            }
        } else if kind == Operation::Create as i32 {
            answer.bytes()?;
        } else if kind == Operation::SetData as i32 {
            stat(answer)?;
        } else if kind != Operation::Delete as i32 {
            return Err(Malformed);
        }
    }
    Ok(failed)
}

/// A session as the server grants it.
pub(super) struct Granted {
    pub(super) id: i64,
    pub(super) timeout: Duration,
    pub(super) password: Vec<u8>,
}

/// Opens a session, or takes one to another connection.
pub(super) fn connect(last_zxid: i64, timeout: Duration, id: i64, password: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    out.put_i32(0);
    out.put_i64(last_zxid);
    out.put_i32(i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX));
    out.put_i64(id);
    put_bytes(&mut out, password);
    // A server without its ensemble would only be read.
    put_flag(&mut out, false);
    out
}

/// `None` if the server does not know the session any more.
pub(super) fn granted(answer: &mut Reader<'_>) -> Result<Option<Granted>, Malformed> {
    let (_version, timeout_ms, id) = (answer.int()?, answer.int()?, answer.long()?);
    let password = answer.bytes()?.to_vec();
    let timeout_ms = u64::try_from(timeout_ms).unwrap_or(0);
    let is_granted = timeout_ms > 0 && id != 0;
    Ok(is_granted.then(|| Granted { id, timeout: Duration::from_millis(timeout_ms), password }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventKind {
    Created,
    Deleted,
    DataChanged,
    ChildrenChanged,
}

/// The kind and the path of an event of a watch.
pub(super) fn event(event: &mut Reader<'_>) -> Result<(EventKind, String), Malformed> {
    let kind = match event.int()? {
        1 => EventKind::Created,
        2 => EventKind::Deleted,
        3 => EventKind::DataChanged,
        4 => EventKind::ChildrenChanged,
        _ => return Err(Malformed),
    };
    let _session_state = event.int()?;
    Ok((kind, event.text()?))
}
