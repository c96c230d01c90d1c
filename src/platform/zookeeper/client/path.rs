//! Paths of nodes below a chroot.

use std::sync::Arc;

use bytes::BufMut as _;

use super::Error;
use super::jute::put_length;
use super::records::Write;

/// The node below which all paths of a client lie.
#[derive(Debug, Clone, Default)]
pub(super) struct Chroot(Arc<str>);

/// A path that the server accepts.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodePath<'a> {
    chroot: &'a str,
    path: &'a str,
}

impl Chroot {
    pub(super) fn new(path: &str) -> Result<Self, Error> {
        check(path)?;
        Ok(Self(if path == "/" { Arc::default() } else { path.into() }))
    }

    pub(super) fn node<'a>(&'a self, path: &'a str) -> Result<NodePath<'a>, Error> {
        check(path)?;
        Ok(NodePath { chroot: &self.0, path: if path == "/" && !self.0.is_empty() { "" } else { path } })
    }

    /// The path that is written. The last part of a sequential one is what the server puts a number behind, and may be empty.
    pub(super) fn target<'a>(&'a self, write: &'a Write<'_>) -> Result<NodePath<'a>, Error> {
        let path = write.path();
        match path.strip_suffix('/') {
            Some(parent) if write.is_sequential() => {
                check(if parent.is_empty() { "/" } else { parent })?;
                Ok(NodePath { chroot: &self.0, path })
            }
            Some(_) | None => self.node(path),
        }
    }

    /// The part of a server's path below the chroot.
    pub(super) fn strip<'a>(&self, path: &'a str) -> &'a str {
        match path.strip_prefix(&*self.0) {
            Some("") => "/",
            Some(below) => below,
            None => path,
        }
    }
}

impl NodePath<'_> {
    pub(super) fn put(self, out: &mut Vec<u8>) {
        put_length(out, self.chroot.len() + self.path.len());
        out.put_slice(self.chroot.as_bytes());
        out.put_slice(self.path.as_bytes());
    }

    pub(super) fn to_full(self) -> String {
        format!("{}{}", self.chroot, self.path)
    }
}

/// Behind a chroot, a path that does not begin with a slash would lie outside of it.
fn check(path: &str) -> Result<(), Error> {
    let is_name = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    let is_path = path == "/" || path.strip_prefix('/').is_some_and(|path| path.split('/').all(is_name));
    if is_path { Ok(()) } else { Err(Error::BadArguments("the path is no path of a node")) }
}

#[cfg(test)]
mod tests {
    use super::super::CreateMode;
    use super::*;

    #[test]
    fn paths_lie_below_the_chroot() {
        let full = |chroot: &Chroot, path| chroot.node(path).map(NodePath::to_full);
        let (none, ci) = (Chroot::default(), Chroot::new("/ci").expect("a path"));
        assert_eq!((full(&none, "/"), full(&none, "/a/b")), (Ok("/".to_owned()), Ok("/a/b".to_owned())));
        assert_eq!((full(&ci, "/"), full(&ci, "/a")), (Ok("/ci".to_owned()), Ok("/ci/a".to_owned())));
        assert_eq!((ci.strip("/ci"), ci.strip("/ci/a"), none.strip("/a")), ("/", "/a", "/a"));
        let numbered = Write::Create { path: "/a/", data: b"", mode: CreateMode::PersistentSequential };
        assert_eq!(ci.target(&numbered).map(NodePath::to_full), Ok("/ci/a/".to_owned()));
        assert!(ci.target(&Write::Delete { path: "/a/", version: None }).is_err());
        for path in ["", "a", "/a/", "//", "/a//b", "/../b", "/.", "/a\0"] {
            assert!(full(&ci, path).is_err(), "{path:?}");
        }
    }
}
