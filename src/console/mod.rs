//! What each role shows, as [`rows`] made of its status once, and what draws rows: [`text`] in a terminal, [`page`] in a browser,
//! and `journeyman top`. The JSON is the status itself. [`openmetrics`] writes the metrics that a role lists beside its rows, and [`http`] serves them.

pub mod app;
pub mod controller;
pub mod http;
pub(crate) mod notifier;
pub mod openmetrics;
pub(crate) mod otlp;
pub mod page;
pub(crate) mod picture;
pub mod rows;
pub(crate) mod task;
pub mod text;
pub(crate) mod untrusted_text;
pub mod worker;
