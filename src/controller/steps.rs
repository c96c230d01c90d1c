//! Jobs about request queues, some at once, beside the loop.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
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
use crate::limits::{AMQP_CALL_TIMEOUT, CONTROLLER_LOOK_HANDS, CONTROLLER_STEP_HANDS};

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

/// What several hands share.
struct Desk<'a> {
    connection: &'a Connection,
    names: &'a Names,
    keeping: Keeping,
    said: Said,
    steps: tokio::sync::Mutex<mpsc::Receiver<(Key, Step)>>,
    depths: tokio::sync::Mutex<mpsc::Receiver<Key>>,
    done: mpsc::Sender<Finished>,
    /// Whose queues somebody else has made.
    others: Mutex<BTreeSet<Key>>,
    /// Channels on which a step about a queue was not done in time. It may be yet: the next one about that queue has to come after it.
    stuck: Mutex<BTreeMap<Key, Channel>>,
}

/// Does what is to be done about queues, some of it at once: the broker takes its time for each. There is one step about each queue
/// at a time, as the rules have it, and whoever waits for one is a request: looks have hands of their own.
pub(super) async fn work(
    connection: &Connection,
    names: &Names,
    keeping: Keeping,
    said: Said,
    (steps, depths): (mpsc::Receiver<(Key, Step)>, mpsc::Receiver<Key>),
    done: mpsc::Sender<Finished>,
) -> Over {
    let (steps, depths) = (tokio::sync::Mutex::new(steps), tokio::sync::Mutex::new(depths));
    let (others, stuck) = (Mutex::default(), Mutex::default());
    let desk = &Desk { connection, names, keeping, said, steps, depths, done, others, stuck };
    let mut hands: Vec<Pin<Box<dyn Future<Output = Over> + Send + '_>>> = Vec::new();
    hands.extend((0..CONTROLLER_STEP_HANDS).map(|_| Box::pin(desk.carry_out_steps()) as _));
    hands.extend((0..CONTROLLER_LOOK_HANDS).map(|_| Box::pin(desk.look_into_queues()) as _));
    std::future::poll_fn(|context| {
        let over = hands.iter_mut().find_map(|hand| match hand.as_mut().poll(context) {
            Poll::Ready(over) => Some(over),
            Poll::Pending => None,
        });
        over.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

impl Desk<'_> {
    async fn carry_out_steps(&self) -> Over {
        let mut kept = None;
        loop {
            let next = self.steps.lock().await.recv().await;
            let Some((key, step)) = next else { return ended("steps") };
            let tried = self.attempt(&mut kept, &key, Some(step)).await;
            if let Err(over) = self.finished(key, |answer| Done::Step(step, answer), tried).await {
                return over;
            }
        }
    }

    async fn look_into_queues(&self) -> Over {
        let mut kept = None;
        loop {
            let next = self.depths.lock().await.recv().await;
            let Some(key) = next else { return ended("looks") };
            let tried = self.attempt(&mut kept, &key, None).await;
            if let Err(over) = self.finished(key, Done::Depth, tried).await {
                return over;
            }
        }
    }

    /// Carries out a step about the queue of a key, or looks into it. A channel on which nothing was heard in time is not kept: a step
    /// may yet be done there, and the next one about that queue has to come after it.
    async fn attempt(&self, kept: &mut Option<Channel>, key: &Key, step: Option<Step>) -> Result<Tried, Over> {
        let before = step.and_then(|_| lock(&self.stuck).remove(key));
        let opening = timeout(AMQP_CALL_TIMEOUT, self.open(before.or_else(|| kept.take())));
        let Ok(open) = opening.await else { return Ok(Tried::failed(SILENT.to_owned())) };
        let mut open = open?;
        let doing = async {
            match step {
                Some(step) => self.step(&mut open, key, step).await,
                None => depth(&open, self.names, key).await,
            }
        };
        let done = timeout(AMQP_CALL_TIMEOUT, doing).await;
        match (&done, step) {
            (Ok(_), _) => *kept = Some(open),
            (Err(_), Some(_)) => drop(lock(&self.stuck).insert(key.clone(), open)),
            (Err(_), None) => {}
        }
        Ok(match done {
            Ok(Ok(answer)) => Tried { answer, why: None },
            Ok(Err(error)) => Tried::failed(amqp::shown(&error)),
            Err(_) => Tried::failed(SILENT.to_owned()),
        })
    }

    /// This channel, or another one where it is closed.
    async fn open(&self, channel: Option<Channel>) -> Result<Channel, Over> {
        match channel.filter(|channel| channel.status().connected()) {
            Some(open) => Ok(open),
            None => Ok(self.connection.create_channel().await?),
        }
    }

    /// On this channel, or on one in its place.
    async fn step(&self, open: &mut Channel, key: &Key, step: Step) -> lapin::Result<Answer> {
        let Self { connection, names, keeping, said, .. } = *self;
        let whose = if lock(&self.others).contains(key) { Whose::Others } else { Whose::Ours };
        match topology::carry_out(open, names, keeping, said, key, (step, whose)).await {
            Err(error) if step == Step::Bind && amqp::code(&error) == Some(PRECONDITION_FAILED) => {
                if lock(&self.others).insert(key.clone()) {
                    let why = amqp::shown(&error);
                    tracing::warn!(%key, "its queue was made otherwise, and is taken as it is: {why}");
                }
                *open = connection.create_channel().await?;
                topology::take_queue(open, names, key).await
            }
            other => {
                // It is gone, or was made here: one that could not be deleted is still what it was.
                let is_done = matches!(other, Ok(Answer::Done | Answer::Missing));
                if is_done && matches!(step, Step::Bind | Step::Delete) {
                    lock(&self.others).remove(key);
                }
                other
            }
        }
    }

    async fn finished(
        &self,
        key: Key,
        done: impl FnOnce(Answer) -> Done,
        tried: Result<Tried, Over>,
    ) -> Result<(), Over> {
        let Tried { answer, why } = tried?;
        if let Some(why) = &why {
            tracing::warn!(%key, "a step about its queue failed: {why}");
        }
        self.done.send(Finished { key, done: done(answer), why }).await.map_err(|_| ended("steps"))
    }
}

struct Tried {
    answer: Answer,
    /// Why it failed.
    why: Option<String>,
}

impl Tried {
    const fn failed(why: String) -> Self {
        Self { answer: Answer::Failed, why: Some(why) }
    }
}

const SILENT: &str = "the broker has not answered in time";

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn depth(channel: &Channel, names: &Names, key: &Key) -> lapin::Result<Answer> {
    let Some(queue) = names.request_queue(key) else { return Ok(Answer::Missing) };
    match topology::look(channel, &queue).await {
        Err(error) if amqp::code(&error) == Some(amqp::NOT_FOUND) => Ok(Answer::Missing),
        other => other,
    }
}
