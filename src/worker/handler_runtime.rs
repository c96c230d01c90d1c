//! The threads that handlers run on. They are not those that keep leases: a handler that blocks, or whose log a slow disk
//! holds up, must cost its own task time and no other task its claim.

use std::io;

use tokio::runtime::{Builder, Handle, Runtime};

/// A runtime for handlers, or the one that the worker itself is on.
#[derive(Debug)]
pub(super) struct HandlerRuntime {
    handle: Handle,
    runtime: Option<Runtime>,
}

impl HandlerRuntime {
    /// So many threads of their own.
    pub(super) fn dedicated(count: usize) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(count.max(1))
            .thread_name("journeyman-handler")
            .enable_all()
            .build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// The worker's own runtime, which is the one this is called on.
    pub(super) fn shared() -> Self {
        Self { handle: Handle::current(), runtime: None }
    }

    /// Where to spawn what a handler does.
    pub(super) const fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for HandlerRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A thread that a handler blocks for good is left behind.
            runtime.shutdown_background();
        }
    }
}
