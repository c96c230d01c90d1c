//! A TCP connection that goes wrong when it is told to: what it carries is cut, held up, half closed or refused.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
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
    refused: Arc<OnceLock<String>>,
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
        let refused = Arc::new(OnceLock::new());
        let name = Arc::clone(&refused);
        tasks.spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                while open.try_join_next().is_some() {}
                let Ok(far) = TcpStream::connect(&target).await else { continue };
                let number = count.fetch_add(1, Ordering::Relaxed);
                let line = Line { number, ways: modes.subscribe(), refused: Arc::clone(&name) };
                open.spawn(carry(near, far, line, cut.subscribe()));
            }
        });
        Self { address, ways, cuts, carried, refused, _tasks: tasks }
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

    /// Closes each connection on which a client names this, as a broker does that does not allow it.
    pub(crate) fn refuse(&self, name: &str) {
        self.refused.set(name.to_owned()).expect("one name");
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
    refused: Arc<OnceLock<String>>,
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
    let (mut near_in, mut near_out) = near.into_split();
    let (mut far_in, mut far_out) = far.into_split();
    tokio::select! {
        is_refused = pass(&mut near_in, &mut far_out, line.clone(), Side::FromWorker) => {
            if is_refused {
                near_out.write_all(&internal_error()).await.ok();
                tokio::io::copy(&mut near_in, &mut tokio::io::sink()).await.ok();
            }
            return;
        }
        _ = pass(&mut far_in, &mut near_out, line, Side::FromBroker) => return,
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

/// The frame `connection.close` with the reply code 541.
fn internal_error() -> Vec<u8> {
    let text = b"INTERNAL_ERROR - not permitted";
    let body =
        [&[0, 10, 0, 50, 2, 29, u8::try_from(text.len()).expect("it is short")], &text[..], &[0, 50, 0, 10]].concat();
    let size = u32::try_from(body.len()).expect("it is short").to_be_bytes();
    [&[1, 0, 0], &size[..], &body, &[0xce]].concat()
}

/// Returns true if it ended because of what is refused.
async fn pass(
    from: &mut tokio::net::tcp::OwnedReadHalf,
    to: &mut tokio::net::tcp::OwnedWriteHalf,
    mut line: Line,
    side: Side,
) -> bool {
    let mut piece = vec![0; 16 << 10];
    loop {
        let Ok(read @ 1..) = from.read(&mut piece).await else { return false };
        let names = |name: &String| piece[..read].windows(name.len()).any(|part| part == name.as_bytes());
        if side == Side::FromWorker && line.refused.get().is_some_and(names) {
            return true;
        }
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
                        return false;
                    }
                }
            }
        }
        if to.write_all(&piece[..read]).await.is_err() {
            return false;
        }
    }
}
