//! The threads that run handlers, separate from those that renew leases: a handler that blocks, or waits for a slow
//! disk, delays no other task's reclaim.

use std::io;

use journeyman_platform::tasks::build_runtime;
use tokio::runtime::{Builder, Handle, Runtime};

#[derive(Debug)]
pub(super) struct HandlerRuntime {
    pub(super) handle: Handle,
    runtime: Option<Runtime>,
}

impl HandlerRuntime {
    pub(super) fn dedicated(count: usize) -> io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = build_runtime(builder.worker_threads(count.max(1)).thread_name("journeyman-handler"))?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    pub(super) fn shared() -> Self {
        Self { handle: Handle::current(), runtime: None }
    }
}

impl Drop for HandlerRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // A thread that a handler blocks for ever is left behind.
            runtime.shutdown_background();
        }
    }
}
