//! What a case may do in addition to calling its sources: create and cancel tasks, look at them, let time pass.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use journeyman::source::{Grant, Message, MessageQueue, Recovery, Source};
use journeyman_domain::id::{PriorityQueue, Run, TaskId};
use journeyman_domain::refusal::Refusal;
use serde_json::Value;

pub(crate) type Fut<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// What a case cannot do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Claims can be made and resolved; not so at bare queue storage.
    Claims,
    /// The service keeps runs, their order and their ends, and tasks can be canceled.
    History,
    /// The source hands out messages.
    Messages,
    /// The source waits for a task.
    Waits,
    /// Lost claims can be taken over.
    Recovery,
    /// Time can be made to pass, so that a lease ends.
    LeaseEnd,
    /// Time can be made to pass, or be waited for, until a hidden message is seen again.
    Redelivery,
    /// Something that cannot be read can be put among the messages.
    Garbage,
    /// What was stored can be read back.
    Artifacts,
    /// An object can be linked to.
    Links,
}

/// What is done with a case's adapter.
pub(crate) enum Adapter {
    /// Its rigs.
    Present { rigs: Vec<Box<dyn Rig>> },
    /// Why it is not there.
    Absent { name: &'static str, why: String, needed: bool },
}

/// One way of serving the port; makes a bench of its own for every case.
pub(crate) trait Rig {
    fn name(&self) -> String;
    fn can(&self, need: Need) -> bool;
    fn bench(&self) -> Fut<'static, Arc<dyn Bench>>;
    /// How cases are run that let time pass.
    fn waits(&self) -> Waits {
        Waits::Never
    }
}

/// What it means that time passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Waits {
    /// Next to nothing: the clock is moved by hand, or spans are short.
    Never,
    /// Leases are waited for, so all cases that do so are run together, after the others.
    Together,
    /// The same where cases share a queue: one after the other.
    InTurn,
}

/// Which span of time is to pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Span {
    /// Two thirds of a lease.
    MostOfALease,
    /// A lease and all that the service waits on top of it.
    ALease,
    /// A received message stays hidden as long.
    AHiding,
}

/// A task to be created.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) priority: &'static str,
    pub(crate) retries: u32,
    pub(crate) payload: Value,
}

impl Default for Spec {
    fn default() -> Self {
        Self { priority: "lowest", retries: 5, payload: serde_json::json!({ "hello": "world" }) }
    }
}

/// A queue of a case's own.
pub(crate) trait Bench: Send + Sync {
    /// A source that claims from it as this worker.
    fn source(&self, worker: &str) -> Arc<dyn Source>;
    fn create(&self, spec: Spec) -> Fut<'_, TaskId>;
    // Without what a case needs of these, it is not run.
    fn cancel<'a>(&'a self, task: &'a TaskId) -> Fut<'a, ()> {
        panic!("{task} cannot be canceled");
    }
    /// The states of a task's runs: `pending`, `running`, `completed`, `failed`, `exception/<reason>`.
    fn states<'a>(&'a self, task: &'a TaskId) -> Fut<'a, Vec<String>> {
        panic!("the states of {task} are not known");
    }
    /// The content of an artifact, wherever it leads.
    fn artifact<'a>(&'a self, _run: &'a Run, name: &'a str) -> Fut<'a, Vec<u8>> {
        panic!("{name} cannot be read back");
    }
    /// Puts something among the messages that nothing can be made of.
    fn garbage(&self) -> Fut<'_, ()> {
        panic!("all messages can be read");
    }
    fn pass(&self, span: Span) -> Fut<'_, ()> {
        panic!("{span:?} cannot be made to pass");
    }
}

pub(crate) fn messages(source: &dyn Source) -> &dyn MessageQueue {
    source.message_queue().expect("its polls return messages")
}

pub(crate) fn recovery(source: &dyn Source) -> &dyn Recovery {
    source.recovery().expect("its claims can be recovered")
}

/// What was claimed, with the message that led there.
pub(crate) struct Taken {
    pub(crate) message: Option<Message>,
    pub(crate) grant: Grant,
}

/// Receives messages, highest lane first, until there are `count`.
pub(crate) async fn receive(source: &dyn Source, count: usize) -> Vec<Message> {
    let lanes = source.open().await.expect("the lanes are found").priority_queues;
    let mut found = Vec::new();
    // A queue that is not ours may need a moment until a message is seen; the bound is that of the case.
    loop {
        for lane in (0..lanes).map(PriorityQueue) {
            let wanted = u8::try_from(count - found.len()).expect("few are asked for");
            let batch = source.poll(lane, wanted).await.expect("the poll is answered");
            assert!(batch.messages.len() <= usize::from(wanted), "more came than was asked for");
            assert!(batch.messages.iter().all(|message| message.queue == lane));
            found.extend(batch.messages);
            if found.len() == count {
                return found;
            }
        }
        tokio::task::yield_now().await;
    }
}

/// Claims `count` runs, in the order in which the source hands them out.
pub(crate) async fn take(source: &dyn Source, count: usize) -> Vec<Taken> {
    let mut taken = Vec::new();
    while !source.capabilities().long_poll && taken.len() < count {
        for message in receive(source, count - taken.len()).await {
            let run = message.run.as_ref().expect("it is about a run");
            match messages(source).claim(run).await {
                Ok(grant) => taken.push(Taken { message: Some(message), grant }),
                Err(refused) => {
                    // What was canceled while it waited leaves its message behind.
                    assert_eq!(refused.refusal, Refusal::Gone, "{refused}");
                    messages(source).delete(&message).await.expect("it is deleted");
                }
            }
        }
    }
    while taken.len() < count {
        let wanted = u8::try_from(count - taken.len()).expect("few are asked for");
        let batch = source.poll(PriorityQueue(0), wanted).await.expect("the poll is answered");
        assert!(batch.grants.len() <= usize::from(wanted), "more came than was asked for");
        taken.extend(batch.grants.into_iter().map(|grant| Taken { message: None, grant }));
    }
    taken
}

/// Claims one run.
pub(crate) async fn take_one(source: &dyn Source) -> Taken {
    take(source, 1).await.remove(0)
}
