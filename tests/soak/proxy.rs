//! What lies between the worker and its queue, and can be cut.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

#[derive(Debug)]
struct State {
    to: Mutex<Option<SocketAddr>>,
    closed_until: Mutex<Option<Instant>>,
    cuts: watch::Sender<u64>,
}

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
    _serving: JoinSet<()>,
}

impl Proxy {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("bound");
        let state =
            Arc::new(State { to: Mutex::default(), closed_until: Mutex::default(), cuts: watch::Sender::new(0) });
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, Arc::clone(&state)));
        Self { address, state, _serving: serving }
    }

    pub fn root(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn set_target(&self, queue: SocketAddr) {
        *self.state.to.lock() = Some(queue);
    }

    /// Resets every connection.
    pub fn cut(&self) {
        self.state.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Resets every connection and accepts no new one for `span`.
    pub fn cut_for(&self, span: Duration) {
        let until = Instant::now() + span;
        *self.state.closed_until.lock() = Some(until);
        self.cut();
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((mut near, _)) = listener.accept().await else { continue };
        while connections.try_join_next().is_some() {}
        let until = *state.closed_until.lock();
        let to = *state.to.lock();
        let (Some(to), false) = (to, until.is_some_and(|until| Instant::now() < until)) else { continue };
        let mut cuts = state.cuts.subscribe();
        connections.spawn(async move {
            let Ok(mut far) = TcpStream::connect(to).await else { return };
            tokio::select! {
                _ = copy_bidirectional(&mut near, &mut far) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}
