//! Kinds of handlers that the program brings, besides those of journeyman.

use std::fmt;
use std::sync::{Arc, OnceLock};

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use journeyman_platform::settings::Problems;
use journeyman_platform::settings::key::{is_name, join};
use journeyman_platform::settings::load::Loader;
use journeyman_platform::settings::problem::{holds_password, is_secret_name};
use journeyman_worker::handler::DynHandler;
use journeyman_worker::handler::config::CustomHandler;

type Make = dyn Fn(&mut Loader<'_>, &str, Value) -> Option<Arc<dyn DynHandler>> + Send + Sync;

/// A kind of handler, and how one is made of a section.
pub(crate) struct HandlerKind {
    pub(crate) name: String,
    make: Box<Make>,
}

/// The kinds of journeyman.
pub(crate) const BUILT_IN: [&str; 4] = ["command", "program", "http", "kubernetes"];

/// Set once, before the command line is read.
static KINDS: OnceLock<Vec<HandlerKind>> = OnceLock::new();

impl HandlerKind {
    /// `make` gets the section as its own type, and may refuse it.
    pub(crate) fn new<S: DeserializeOwned>(
        name: &str,
        make: impl Fn(S) -> Result<Arc<dyn DynHandler>, String> + Send + Sync + 'static,
    ) -> Self {
        let place = format!(" of kind `{name}`");
        let make = move |loader: &mut Loader<'_>, key: &str, section: Value| {
            let settings = loader.read(key, section, &place)?;
            make(settings).map_err(|why| loader.refuse(key, &why)).ok()
        };
        Self { name: name.to_owned(), make: Box::new(make) }
    }

    /// The handler of a program that has no section for it.
    ///
    /// # Errors
    ///
    /// The keys that it needs.
    pub(crate) fn without_section(&self) -> Result<CustomHandler, Problems> {
        let mut loader = Loader::new(None);
        let read = self.read(&mut loader, &join("handler", &self.name), Table::new().into());
        read.ok_or_else(|| Problems::new(None, loader.problems))
    }

    pub(crate) fn read(&self, loader: &mut Loader<'_>, key: &str, section: Value) -> Option<CustomHandler> {
        let mut settings = section.as_table().cloned().unwrap_or_else(Table::new);
        settings.iter_mut().for_each(|(name, value)| mask(name, value));
        let handler = (self.make)(loader, key, section)?;
        Some(CustomHandler { kind: self.name.clone(), settings, handler })
    }
}

/// Masks what may be a secret in settings whose meaning only the program knows.
fn mask(name: &str, value: &mut Value) {
    match value {
        Value::Table(table) => table.iter_mut().for_each(|(name, value)| mask(name, value)),
        Value::Array(items) => items.iter_mut().for_each(|item| mask(name, item)),
        Value::String(text) => {
            let is_secret = is_secret_name(name) || name.contains("key") || name.contains("auth");
            if is_secret || holds_password(text) {
                "***".clone_into(text);
            }
        }
        Value::Integer(_) | Value::Float(_) | Value::Boolean(_) | Value::Datetime(_) => {}
    }
}

impl fmt::Debug for HandlerKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("HandlerKind").field("name", &self.name).finish_non_exhaustive()
    }
}

/// # Panics
///
/// A name is no name of a section, or is used twice, or kinds were registered before.
pub(crate) fn register(kinds: Vec<HandlerKind>) {
    for (number, kind) in kinds.iter().enumerate() {
        let is_built_in = BUILT_IN.contains(&kind.name.as_str());
        let is_twice = kinds[..number].iter().any(|other| other.name == kind.name);
        assert!(is_name(&kind.name) && !is_built_in && !is_twice, "{:?} cannot name a kind of handlers", kind.name);
    }
    assert!(KINDS.set(kinds).is_ok(), "the kinds of handlers are registered once");
}

pub(crate) fn all() -> &'static [HandlerKind] {
    KINDS.get().map_or(&[], Vec::as_slice)
}

/// The kinds of this program, those of journeyman first.
pub(crate) fn names() -> Vec<&'static str> {
    BUILT_IN.into_iter().chain(all().iter().map(|kind| kind.name.as_str())).collect()
}

pub(crate) fn find(name: &str) -> Option<&'static HandlerKind> {
    all().iter().find(|kind| kind.name == name)
}
