//! Calls that share transactions: a call that comes while a transaction runs is in the next one.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinSet;

use super::sql::StoreFailure;
use journeyman_platform::tasks::supervised;

type Reply<Out> = oneshot::Sender<Result<Out, StoreFailure>>;

/// What waits for a transaction.
pub(super) struct Batches<In, Out> {
    what: &'static str,
    /// So many run at once.
    transactions_max: usize,
    weight: fn(&In) -> usize,
    weight_max: usize,
    waiting: Mutex<Waiting<In, Out>>,
    tasks: Mutex<JoinSet<()>>,
}

struct Waiting<In, Out> {
    calls: VecDeque<(In, Reply<Out>)>,
    transactions: usize,
}

impl<In: Clone + Send + 'static, Out: Send + 'static> Batches<In, Out> {
    /// The calls of one transaction weigh at most so much, unless it is one call.
    pub(super) fn new(
        what: &'static str,
        transactions_max: usize,
        weight: fn(&In) -> usize,
        weight_max: usize,
    ) -> Arc<Self> {
        let waiting = Mutex::new(Waiting { calls: VecDeque::new(), transactions: 0 });
        Arc::new(Self { what, transactions_max, weight, weight_max, waiting, tasks: Mutex::default() })
    }

    /// `run` returns a result for each call, or an error of them all; those with an error of their data are run again, each alone.
    ///
    /// # Cancel safety
    ///
    /// A call is left out if the caller goes before its transaction begins; afterwards it is done without a reply.
    pub(super) async fn call<R>(
        self: &Arc<Self>,
        call: In,
        run: impl Fn(Vec<In>) -> R + Send + Sync + 'static,
    ) -> Result<Out, StoreFailure>
    where
        R: Future<Output = Result<Vec<Out>, StoreFailure>> + Send,
    {
        let (reply, answer) = oneshot::channel();
        let begins = {
            let mut waiting = self.waiting.lock();
            // While a transaction hangs, callers go and come again.
            waiting.calls.retain(|(_, reply)| !reply.is_closed());
            waiting.calls.push_back((call, reply));
            let begins = waiting.transactions < self.transactions_max;
            waiting.transactions += usize::from(begins);
            begins
        };
        if begins {
            let batches = Arc::clone(self);
            let mut tasks = self.tasks.lock();
            while tasks.try_join_next().is_some() {}
            tasks.spawn(supervised(self.what, async move {
                while let Some((calls, replies)) = batches.next() {
                    run_all(calls, replies, &run).await;
                }
            }));
        }
        answer.await.unwrap_or_else(|_| Err(StoreFailure::Unusable("its transaction has ended".into())))
    }

    /// The calls of the next transaction; none if nothing waits, and the task of the caller ends.
    fn next(&self) -> Option<(Vec<In>, Vec<Reply<Out>>)> {
        let mut waiting = self.waiting.lock();
        let (mut batch, mut weight) = (Vec::new(), 0);
        while let Some((call, reply)) = waiting.calls.pop_front() {
            if reply.is_closed() {
                continue;
            }
            weight += (self.weight)(&call);
            if weight > self.weight_max && !batch.is_empty() {
                waiting.calls.push_front((call, reply));
                break;
            }
            batch.push((call, reply));
        }
        waiting.transactions -= usize::from(batch.is_empty());
        (!batch.is_empty()).then(|| batch.into_iter().unzip())
    }
}

async fn run_all<In: Clone, Out, R: Future<Output = Result<Vec<Out>, StoreFailure>>>(
    calls: Vec<In>,
    replies: Vec<Reply<Out>>,
    run: &impl Fn(Vec<In>) -> R,
) {
    let result = run(calls.clone()).await;
    if let (Err(StoreFailure::Failed(_)), 2..) = (&result, calls.len()) {
        for (call, reply) in calls.into_iter().zip(replies) {
            drop(reply.send(run(vec![call]).await.and_then(|mut of_one| of_one.pop().ok_or_else(no_result))));
        }
        return;
    }
    let mut results = result.map(Vec::into_iter);
    for reply in replies {
        let result = results.as_mut().map_err(|error| error.clone());
        // The caller may be gone.
        drop(reply.send(result.and_then(|results| results.next().ok_or_else(no_result))));
    }
}

fn no_result() -> StoreFailure {
    StoreFailure::Unusable("a call has no result".into())
}
