//! What is done around the payloads of a handler.

use std::sync::Arc;

use serde_json::Value;

use super::{Context, DynHandler, EndedWork, HandlerFuture, Preparing, Sidecar};

/// Prepares a payload by the handler inside, and may do more before and after.
pub(super) trait Layer: Send + Sync + 'static {
    fn prepare<'a>(&'a self, inner: Inner<'a>, context: &'a Context) -> Preparing<'a>;
}

/// The handler inside a layer, with the payload to prepare.
#[derive(Clone, Copy)]
pub(super) struct Inner<'a> {
    handler: &'a dyn DynHandler,
    /// `None` for that of the context's task.
    payload: Option<&'a Value>,
}

impl Inner<'_> {
    pub(super) fn prepare<'b>(&'b self, context: &'b Context) -> Preparing<'b> {
        match self.payload {
            Some(payload) => self.handler.prepare(payload, context),
            None => self.handler.prepare_task(context),
        }
    }
}

struct Layered<L> {
    handler: Arc<dyn DynHandler>,
    layer: L,
}

/// A handler that differs from another by what is done around its payloads.
pub(super) fn layered(handler: Arc<dyn DynHandler>, layer: impl Layer) -> Arc<dyn DynHandler> {
    Arc::new(Layered { handler, layer })
}

impl<L: Layer> DynHandler for Layered<L> {
    fn describe(&self) -> String {
        self.handler.describe()
    }

    fn schema(&self) -> Value {
        self.handler.schema()
    }

    fn prepare<'a>(&'a self, payload: &'a Value, context: &'a Context) -> Preparing<'a> {
        self.layer.prepare(Inner { handler: &*self.handler, payload: Some(payload) }, context)
    }

    fn prepare_task<'a>(&'a self, context: &'a Context) -> Preparing<'a> {
        self.layer.prepare(Inner { handler: &*self.handler, payload: None }, context)
    }

    fn discard<'a>(&'a self, work: &'a EndedWork) -> Option<HandlerFuture<'a, Result<(), String>>> {
        self.handler.discard(work)
    }

    fn sidecar(&self) -> Option<Sidecar> {
        self.handler.sidecar()
    }

    fn end_leftovers(&self) -> Option<HandlerFuture<'_, Result<usize, String>>> {
        self.handler.end_leftovers()
    }
}
