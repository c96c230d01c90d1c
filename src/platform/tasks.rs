//! Tasks that a role starts beside its own. A panic in one of them is a bug: the role says so and ends, since it would look
//! well while a part of its work is no longer done.

use std::any::Any;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::LazyLock;

use futures_util::FutureExt as _;
use journeyman_domain::limits::BLOCKING_THREAD_IDLE_MAX;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::{JoinError, spawn_blocking};

/// Builds a runtime whose pool for blocking work has a thread at any time: tokio panics if it needs the first one and the host has no
/// more threads. Work for which there is no thread waits.
///
/// # Errors
///
/// The host gives no thread, or no file for its events.
pub fn build_runtime(builder: &mut Builder) -> io::Result<Runtime> {
    let runtime = builder.enable_all().thread_keep_alive(BLOCKING_THREAD_IDLE_MAX).build()?;
    runtime.spawn_blocking(|| ());
    Ok(runtime)
}

/// The first panic of a supervised task.
static FAILURE: LazyLock<watch::Sender<Option<String>>> = LazyLock::new(|| watch::Sender::new(None));

/// Runs `work` as the task that `what` names. If it panics, [`failure`] says so, and the task stays pending.
pub async fn supervised<F: Future>(what: &'static str, work: F) -> F::Output {
    let ended = AssertUnwindSafe(work).catch_unwind().await;
    match ended {
        Ok(output) => output,
        Err(panic) => {
            on_panic(what, &*panic);
            std::future::pending().await
        }
    }
}

fn on_panic(what: &'static str, panic: &(dyn Any + Send)) {
    let message = format!("internal error: the task of {what} panicked: {}; please report it", panic_message(panic));
    tracing::error!("{message}");
    FAILURE.send_if_modified(|failure| failure.is_none() && failure.replace(message).is_none());
}

/// Runs `work` on a thread that may block. A panic of the work is one of the caller.
///
/// # Errors
///
/// Fails if the runtime ends first.
///
/// # Cancel safety
///
/// The work goes on if the caller goes.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    match spawn_blocking(work).await.map_err(JoinError::try_into_panic) {
        Ok(done) => Ok(done),
        Err(Ok(panic)) => resume_unwind(panic),
        Err(Err(ended)) => Err(ended),
    }
}

/// Resolves once a supervised task of this process has panicked.
pub async fn failure() -> String {
    let mut failures = FAILURE.subscribe();
    match failures.wait_for(Option::is_some).await.map(|failure| failure.clone()) {
        Ok(Some(message)) => message,
        Ok(None) | Err(_) => std::future::pending().await,
    }
}

/// What [`failure`] says, if anything has failed.
pub fn failed() -> Option<String> {
    FAILURE.borrow().clone()
}

/// The text of a panic.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use journeyman_domain::limits::HOST_RESOURCES_INTERVAL;
    use tokio::task::JoinSet;

    use super::*;

    #[test]
    fn a_runtime_has_a_thread_for_blocking_work_from_the_start_and_keeps_it_until_the_next_measurement() {
        let (starts, started) = mpsc::channel();
        let mut builder = Builder::new_current_thread();
        builder.on_thread_start(move || starts.send(()).unwrap());
        let runtime = build_runtime(&mut builder).unwrap();
        started.recv().unwrap();
        drop(runtime);
        assert!(BLOCKING_THREAD_IDLE_MAX > 2 * HOST_RESOURCES_INTERVAL);
    }

    #[tokio::test]
    async fn a6_a_panic_of_a_supervised_task_is_told_and_its_result_is_not_awaited_in_vain() {
        let mut tasks = JoinSet::new();
        tasks.spawn(supervised("the sum", async { 1 + 1 }));
        assert_eq!(tasks.join_next().await.unwrap().unwrap(), 2);
        assert_eq!(failed(), None);
        tasks.spawn(supervised("the lease", async { panic!("no {}", "lease") }));
        let message = tokio::select! {
            message = failure() => message,
            _ = tasks.join_next() => panic!("it has no result"),
        };
        assert!(message.contains("the lease panicked: no lease"), "{message}");
        assert_eq!(failed(), Some(message));
    }
}
