//! A TCP connection that goes wrong when it is told to: what it carries is cut, held up or half closed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What a wire does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Carries.
    Carry,
    /// Carries each piece after a while.
    Delay(Duration),
    /// Carries nothing, and says nothing.
    Stall,
    /// Carries from the broker to the worker, and nothing back.
    HalfOpen,
}

/// A proxy before a broker.
pub(crate) struct Wire {
    address: SocketAddr,
    way: watch::Sender<Way>,
    /// Grows with each cut.
    cuts: watch::Sender<u64>,
    carried: Arc<AtomicU64>,
    /// Grows with each piece that is not carried at once.
    held_up: watch::Sender<u64>,
    _tasks: JoinSet<()>,
}

impl Wire {
    /// One to the broker at `host:port`.
    pub(crate) async fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (way, cuts) = (watch::Sender::new(Way::Carry), watch::Sender::new(0));
        let carried = Arc::new(AtomicU64::new(0));
        let held_up = watch::Sender::new(0);
        let mut tasks = JoinSet::new();
        let (ways, cut, target, count) = (way.clone(), cuts.clone(), target.to_owned(), Arc::clone(&carried));
        let held = held_up.clone();
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                while open.try_join_next().is_some() {}
                let Ok(far) = TcpStream::connect(&target).await else { continue };
                count.fetch_add(1, Ordering::Relaxed);
                open.spawn(carry(near, far, ways.subscribe(), cut.subscribe(), held.clone()));
            }
        });
        Self { address, way, cuts, carried, held_up, _tasks: tasks }
    }

    /// The address of a broker by way of this wire.
    pub(crate) fn uri(&self, uri: &str) -> String {
        let (head, rest) = uri.split_once('@').expect("an address with a user");
        let (_, path) = rest.split_once('/').expect("an address with a path");
        format!("{head}@{}/{path}", self.address)
    }

    /// How many connections it has carried.
    pub(crate) fn connections(&self) -> u64 {
        self.carried.load(Ordering::Relaxed)
    }

    pub(crate) fn set(&self, way: Way) {
        self.way.send_replace(way);
    }

    /// Resolves when a piece is held up from now on.
    pub(crate) fn held_up(&self) -> impl Future<Output = ()> + use<> {
        let mut held_up = self.held_up.subscribe();
        async move { held_up.changed().await.expect("the wire stays") }
    }

    /// Resets every connection.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

async fn carry(
    near: TcpStream,
    far: TcpStream,
    ways: watch::Receiver<Way>,
    mut cuts: watch::Receiver<u64>,
    held_up: watch::Sender<u64>,
) {
    cuts.borrow_and_update();
    // Closed without a word: what was on its way is lost, as with a cable.
    for stream in [&near, &far] {
        stream.set_zero_linger().expect("an open socket");
        stream.set_nodelay(true).expect("an open socket");
    }
    let (near_in, near_out) = near.into_split();
    let (far_in, far_out) = far.into_split();
    tokio::select! {
        () = pass(near_in, far_out, ways.clone(), Side::FromWorker, held_up.clone()) => {}
        () = pass(far_in, near_out, ways, Side::FromBroker, held_up) => {}
        _ = cuts.changed() => {}
    }
}

#[derive(PartialEq, Eq)]
enum Side {
    FromWorker,
    FromBroker,
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut ways: watch::Receiver<Way>,
    side: Side,
    held_up: watch::Sender<u64>,
) {
    let mut piece = vec![0; 16 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut piece).await else { return };
        loop {
            let way = *ways.borrow_and_update();
            match way {
                Way::Carry => break,
                Way::Delay(span) => {
                    held_up.send_modify(|pieces| *pieces += 1);
                    tokio::time::sleep(span).await;
                    break;
                }
                Way::HalfOpen if side == Side::FromBroker => break,
                Way::Stall | Way::HalfOpen => {
                    held_up.send_modify(|pieces| *pieces += 1);
                    if ways.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
        if to.write_all(&piece[..read]).await.is_err() {
            return;
        }
    }
}
