//! Jobs about request queues, some at once, beside the loop.

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;

use lapin::{Channel, Connection};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::names::Names;
use super::session::{Over, ended};
use super::topology::{self, Keeping, PRECONDITION_FAILED, Said, Whose};
use crate::amqp;
use crate::domain::group::Key;
use crate::domain::group::pool::{Answer, Step};
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_HANDS};

/// Something about a queue.
enum Job {
    Step(Step),
    Depth,
}

pub(super) enum Done {
    Step(Step, Answer),
    Depth(Answer),
}

/// What came of a job, and why where it failed.
pub(super) struct Finished {
    pub(super) key: Key,
    pub(super) done: Done,
    pub(super) why: Option<String>,
}

/// What is to be done.
struct Desk {
    steps: mpsc::Receiver<(Key, Step)>,
    depths: mpsc::Receiver<Key>,
}

/// Does what is to be done about queues, some of it at once: the broker takes its time for each. There is one step about each queue
/// at a time, as the rules have it.
pub(super) async fn work(
    connection: &Connection,
    names: &Names,
    keeping: Keeping,
    said: Said,
    (steps, depths): (mpsc::Receiver<(Key, Step)>, mpsc::Receiver<Key>),
    done: mpsc::Sender<Finished>,
) -> Over {
    let (desk, others) = (tokio::sync::Mutex::new(Desk { steps, depths }), Mutex::default());
    let hand = || Box::pin(hand(connection, names, (keeping, said), &desk, &others, &done));
    let mut hands: Vec<_> = (0..CONTROLLER_HANDS).map(|_| hand()).collect();
    std::future::poll_fn(|context| {
        let over = hands.iter_mut().find_map(|hand| match hand.as_mut().poll(context) {
            Poll::Ready(over) => Some(over),
            Poll::Pending => None,
        });
        over.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Takes one job after the other: steps first, since who waits for one is a request.
async fn hand(
    connection: &Connection,
    names: &Names,
    (keeping, said): (Keeping, Said),
    desk: &tokio::sync::Mutex<Desk>,
    others: &Mutex<BTreeSet<Key>>,
    done: &mpsc::Sender<Finished>,
) -> Over {
    let others = || others.lock().unwrap_or_else(PoisonError::into_inner);
    let mut channel: Option<Channel> = None;
    loop {
        let next = async {
            let Desk { steps, depths } = &mut *desk.lock().await;
            tokio::select! {
                biased;
                Some((key, step)) = steps.recv() => Some((key, Job::Step(step))),
                Some(key) = depths.recv() => Some((key, Job::Depth)),
                else => None,
            }
        };
        let Some((key, job)) = next.await else { break };
        let open = match channel.take().filter(|channel| channel.status().connected()) {
            Some(open) => open,
            None => match connection.create_channel().await {
                Ok(open) => open,
                Err(error) => return error.into(),
            },
        };
        let doing = async {
            match &job {
                Job::Step(step) => {
                    let whose = if others().contains(&key) { Whose::Others } else { Whose::Ours };
                    let done = topology::carry_out(&open, names, keeping, said, &key, (*step, whose)).await;
                    match done {
                        Err(error) if *step == Step::Bind && amqp::code(&error) == Some(PRECONDITION_FAILED) => {
                            if others().insert(key.clone()) {
                                let why = amqp::shown(&error);
                                tracing::warn!(%key, "its queue was made otherwise, and is taken as it is: {why}");
                            }
                            topology::take_queue(&connection.create_channel().await?, names, &key).await
                        }
                        other => {
                            // It is gone, or was made here: one that could not be deleted is still what it was.
                            let is_done = matches!(other, Ok(Answer::Done | Answer::Missing));
                            if is_done && matches!(step, Step::Bind | Step::Delete) {
                                others().remove(&key);
                            }
                            other
                        }
                    }
                }
                Job::Depth => depth(&open, names, &key).await,
            }
        };
        let (answer, why) = match within(doing).await {
            Ok(answer) => (answer, None),
            Err(why) => {
                tracing::warn!(%key, "a step about its queue failed: {why}");
                (Answer::Failed, Some(why))
            }
        };
        channel = Some(open);
        let finished = match job {
            Job::Step(step) => Done::Step(step, answer),
            Job::Depth => Done::Depth(answer),
        };
        if done.send(Finished { key, done: finished, why }).await.is_err() {
            break;
        }
    }
    ended("steps")
}

async fn within(doing: impl Future<Output = lapin::Result<Answer>>) -> Result<Answer, String> {
    match timeout(AMQP_CALL_TIMEOUT, doing).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(amqp::shown(&error)),
        Err(_) => Err(format!("not done in {AMQP_CALL_TIMEOUT:?}")),
    }
}

async fn depth(channel: &Channel, names: &Names, key: &Key) -> lapin::Result<Answer> {
    let Some(queue) = names.request_queue(key) else { return Ok(Answer::Missing) };
    match topology::look(channel, &queue).await {
        Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(Answer::Missing),
        other => other,
    }
}
