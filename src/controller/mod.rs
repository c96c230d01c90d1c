//! A controller of worker groups: makes the queues that requests of a pool need, starts workers for their keys, and takes both
//! away when nobody needs them.
//!
//! Which groups are wanted, what follows from it, and how many workers each has is decided in [`crate::domain::group`]. One
//! loop carries that out; what waits for the broker waits beside it. Whoever holds the lock queue of a pool is its controller,
//! any other one stands by. Workers outlive the controller, and the next one finds them again.

mod names;
mod publish;
mod session;
mod staff;
mod subprocess;
mod topology;

use std::time::Duration;

use secrecy::SecretString;
use tokio_util::sync::CancellationToken;

use crate::amqp::Broker;
use crate::domain::backoff::Backoff;
use crate::domain::group::pool::{Event, Pool};
use crate::domain::group::{scale, tracker};
use crate::domain::jitter::Jitter;
use crate::domain::poll::TROUBLE;
use crate::host::clock::Clock;
use crate::limits::CONTROLLER_LOOK_EVERY;

pub use names::{Names, Spelling};
pub use subprocess::Program;
pub use topology::{Keeping, Profile};

use session::Over;
use staff::Staff;

/// What a controller of one pool has to know.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The pool, as people call it.
    pub pool: String,
    /// The broker.
    pub broker: Broker,
    /// Its address as workers are given it, with user and password.
    pub uri: SecretString,
    /// What things are called.
    pub names: Names,
    /// How requests are kept.
    pub keeping: Keeping,
    /// How long groups stay.
    pub delays: tracker::Policy,
    /// How many workers a group has.
    pub limits: scale::Limits,
    /// How many all groups have together; `None` is any number.
    pub budget: Option<scale::Budget>,
    /// What is started; `None` where somebody else starts the workers.
    pub program: Option<Program>,
    /// The `x-status` of answers that the controller gives in a worker's place.
    pub dead_letter_status: String,
}

/// Controls the pool until it is told to leave. Workers and queues stay as they are then.
///
/// # Errors
///
/// Where the folder of the workers cannot be used.
pub async fn run(settings: Settings, leave: CancellationToken) -> std::io::Result<()> {
    let clock = Clock::boot();
    let seed = uuid::Uuid::new_v4().as_u64_pair().0;
    let mut pool = Pool::new(settings.delays, seed, clock.now());
    let mut staff = Staff::find(&settings, clock.now())?;
    let (mut jitter, mut row, mut epoch) = (Jitter::seeded(seed), Backoff::NEW, 0);
    loop {
        epoch += 1;
        let over = tokio::select! {
            over = session::live(&settings, &mut pool, &mut staff, clock, epoch, &mut row) => over,
            () = leave.cancelled() => return Ok(()),
        };
        pool.handle(Event::Disconnected, clock.now());
        let Over { why } = over;
        if row.tries() == 0 {
            tracing::warn!(pool = settings.pool, "the broker is lost: {why}; workers go on, and it is tried again");
        } else {
            tracing::debug!(pool = settings.pool, "still no broker: {why}");
        }
        let again = clock.now().plus(row.wait(TROUBLE, None, &mut jitter));
        while clock.now() < again {
            let rest = again.since(clock.now()).min(CONTROLLER_LOOK_EVERY);
            tokio::select! {
                () = tokio::time::sleep(rest.max(Duration::from_millis(1))) => {}
                () = leave.cancelled() => return Ok(()),
            }
            // Those that end meanwhile are not left as zombies.
            staff.look(clock.now());
        }
    }
}
