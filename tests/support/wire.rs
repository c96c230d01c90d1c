//! A TCP connection that goes wrong when it is told to: what it carries is cut, held up or half closed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// How a wire treats data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    Carry,
    /// Carries each piece after a while.
    Delay(Duration),
    /// Carries nothing, without closing.
    Stall,
    /// Carries from the broker to the worker, and nothing back.
    HalfOpen,
    /// Carries from the worker to the broker, and no answer.
    Unanswered,
}

/// The mode of all connections, and of some.
#[derive(Debug, Clone, Copy)]
struct Ways {
    all: Way,
    /// The bytes of the connections with a lower number.
    stranded: Option<(u64, Way)>,
}

/// A proxy before a broker.
pub(crate) struct Wire {
    address: SocketAddr,
    ways: watch::Sender<Ways>,
    /// Grows with each cut.
    cuts: watch::Sender<u64>,
    carried: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Wire {
    /// A wire to the broker at `host:port`.
    pub(crate) async fn to(target: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (ways, cuts) = (watch::Sender::new(Ways { all: Way::Carry, stranded: None }), watch::Sender::new(0));
        let carried = Arc::new(AtomicU64::new(0));
        let mut tasks = JoinSet::new();
        let (modes, cut, target, count) = (ways.clone(), cuts.clone(), target.to_owned(), Arc::clone(&carried));
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                while open.try_join_next().is_some() {}
                let Ok(far) = TcpStream::connect(&target).await else { continue };
                let line = Line { number: count.fetch_add(1, Ordering::Relaxed), ways: modes.subscribe() };
                open.spawn(carry(near, far, line, cut.subscribe()));
            }
        });
        Self { address, ways, cuts, carried, _tasks: tasks }
    }

    /// Its own address.
    pub(crate) fn address(&self) -> String {
        self.address.to_string()
    }

    /// The address of a web server by way of this wire.
    pub(crate) fn root(&self) -> String {
        format!("http://{}", self.address)
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

    /// Sets the mode of all connections except stranded ones.
    pub(crate) fn set(&self, way: Way) {
        self.ways.send_modify(|ways| ways.all = way);
    }

    /// Sets the mode of the existing connections until they are cut. Later ones are not affected.
    pub(crate) fn strand(&self, way: Way) {
        let made = self.connections();
        self.ways.send_modify(|ways| ways.stranded = Some((made, way)));
    }

    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }
}

/// The mode as one connection sees it.
#[derive(Debug, Clone)]
struct Line {
    number: u64,
    ways: watch::Receiver<Ways>,
}

impl Line {
    fn way(&mut self) -> Way {
        let Ways { all, stranded } = *self.ways.borrow_and_update();
        stranded.filter(|(before, _)| self.number < *before).map_or(all, |(_, way)| way)
    }
}

async fn carry(near: TcpStream, far: TcpStream, line: Line, mut cuts: watch::Receiver<u64>) {
    cuts.borrow_and_update();
    // Closed without a word: what was on its way is lost, as with a cable.
    for stream in [&near, &far] {
        stream.set_zero_linger().expect("an open socket");
        stream.set_nodelay(true).expect("an open socket");
    }
    let (near_in, mut near_out) = near.into_split();
    let (far_in, mut far_out) = far.into_split();
    tokio::select! {
        () = pass(near_in, &mut far_out, line.clone(), Side::FromWorker) => return,
        () = pass(far_in, &mut near_out, line, Side::FromBroker) => return,
        _ = cuts.changed() => {}
    }
    // A half that is dropped closes in order, before the reset.
    near_out.forget();
    far_out.forget();
}

#[derive(PartialEq, Eq)]
enum Side {
    FromWorker,
    FromBroker,
}

async fn pass(
    mut from: tokio::net::tcp::OwnedReadHalf,
    to: &mut tokio::net::tcp::OwnedWriteHalf,
    mut line: Line,
    side: Side,
) {
    let mut piece = vec![0; 16 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut piece).await else { return };
        loop {
            match line.way() {
                Way::Carry => break,
                Way::Delay(span) => {
                    tokio::time::sleep(span).await;
                    break;
                }
                Way::HalfOpen if side == Side::FromBroker => break,
                Way::Unanswered if side == Side::FromWorker => break,
                Way::Stall | Way::HalfOpen | Way::Unanswered => {
                    if line.ways.changed().await.is_err() {
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
