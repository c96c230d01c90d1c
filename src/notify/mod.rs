//! Tells a notifier of events: the client that the other roles have.

mod announcer;
mod config;
mod event;
mod pattern;
mod publisher;

pub(crate) use announcer::{Announcement, Announcer, Announcing, NotifyConfig, hand_over};
pub use config::Notify;
pub(crate) use config::every_event;
pub(crate) use event::{Event, OWN_TYPES};
pub(crate) use pattern::TypePattern;
pub(crate) use publisher::{CallError, NotifierClient, Publisher};
