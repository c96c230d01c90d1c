//! Requests in the worker's journal.

use std::path::Path;

use journeyman::handler::environment::Variables;
use journeyman::handler::process::{Input, Launch, RunLimits, RunningProcess as Process};
use journeyman::handler::{Context, ExecuteError, ExecuteFailure, host_errors};
use journeyman::task::Reply;
use journeyman::worker::WorkerConfig;

use crate::support::{Act, Client, Kind, PATIENCE, Running, queue};

/// Runs a process, and returns the journal meanwhile.
async fn with_process(journal: &Path, context: &Context) -> Result<String, ExecuteError> {
    let (argv, env) = (["/bin/true".to_owned()], Variables::new());
    let (workdir, within) = (context.workdir(), context.scope());
    let launch = Launch { argv: &argv, env: &env, workdir, input: Input::Null, message_channel: None, scope: within };
    let process = Process::start(launch).await.map_err(|error| {
        assert!(host_errors::is_host_error(&error), "{error}");
        ExecuteError::new(ExecuteFailure::HostFault, error.to_string())
    })?;
    let held = std::fs::read_to_string(journal).expect("there is a journal");
    let bounds = RunLimits { run_time: None, termination_grace: PATIENCE };
    process.finish(bounds, context).await.expect("it ends");
    Ok(held)
}

/// Replies with whether its request is in the journal; with a process, or without one.
fn look(journal: &Path) -> Act {
    let journal = journal.to_owned();
    std::sync::Arc::new(move |request, context| {
        let journal = journal.clone();
        Box::pin(async move {
            let held = if request.path.as_deref() == Some("/process") {
                with_process(&journal, &context).await?
            } else {
                std::fs::read_to_string(&journal).unwrap_or_default()
            };
            let known = held.contains(context.task().run.task.as_str());
            context.set_reply(Reply::ok(known.to_string().into_bytes())).expect("it fits");
            Ok(())
        })
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_journaled_before_its_first_process_and_not_without_one() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let work_dir = folder.path().join("work");
    let act = look(&work_dir.join("journal"));
    let worker = Running::with(queue(&client), |settings| WorkerConfig { work_dir, ..settings }, act);
    assert_eq!(client.call("/none", b"1").await.body, b"false");
    assert_eq!(client.call("/process", b"1").await.body, b"true");
    client.finish(worker).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_journal_only_requests_without_processes_are_answered() {
    let Some(client) = Client::shared(Kind::Transient).await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let work_dir = folder.path().join("work");
    let in_the_way = work_dir.join("journal.next/in the way");
    std::fs::create_dir_all(&in_the_way).expect("made");
    let act = look(&work_dir.join("journal"));
    let worker = Running::with(queue(&client), |settings| WorkerConfig { work_dir, ..settings }, act);
    assert_eq!(client.call("/none", b"1").await.body, b"false");
    assert!(client.publish(Client::properties("p", "/process"), b"1").await);
    crate::support::within("the host is found unfit", async {
        while worker.control.counts().host_faults == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    std::fs::remove_dir_all(in_the_way.parent().expect("a folder")).expect("removed");
    assert_eq!(client.answer("p").await.body, b"true");
    client.finish(worker).await;
}
