//! Tells a notifier of events: the client that the other roles have.

mod announcer;
mod config;
mod event;
mod pattern;
mod publisher;
mod strict_json;

pub use announcer::{Announcement, Announcer, Announcing, NotifyConfig, hand_over};
pub use config::{Notify, every_event};
pub use event::{Event, OWN_TYPES};
pub use pattern::TypePattern;
pub use publisher::{CallError, NotifierClient, Publisher};
