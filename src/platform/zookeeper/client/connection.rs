//! One connection of a session, without its socket: requests in, frames out, and answers to the calls in their order.

use std::collections::VecDeque;
use std::io;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Error;
use super::jute::{Malformed, Reader};
use super::records::{self, Operation, xid};
use super::session::SessionState;
use super::watches::{Subscription, Watches};
use crate::host::clock::Clock;
use journeyman_domain::limits::{
    ZOOKEEPER_ANSWER_BYTES_MAX, ZOOKEEPER_CALLS_IN_FLIGHT_MAX, ZOOKEEPER_REQUEST_BYTES_MAX,
};
use journeyman_domain::time as boot;

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum Loss {
    /// The session goes on with another one.
    Connection(String),
    /// So is the session.
    Session(SessionState),
}

impl From<io::Error> for Loss {
    fn from(error: io::Error) -> Self {
        Self::Connection(error.to_string())
    }
}

impl From<Malformed> for Loss {
    fn from(error: Malformed) -> Self {
        Self::Connection(error.to_string())
    }
}

/// A call on its way to the server.
pub(super) struct Request {
    /// Its operation and record.
    pub(super) body: Vec<u8>,
    pub(super) watch: Option<Subscription>,
    pub(super) caller: Box<dyn Caller>,
}

/// The other end of a call. To drop it tells the caller that the connection was lost.
pub(super) trait Caller: Send {
    fn has_left(&self) -> bool;
    fn answer(self: Box<Self>, answer: Result<Reader<'_>, Error>) -> Result<(), Malformed>;
}

pub(super) struct Waiting<T> {
    pub(super) reply: oneshot::Sender<Result<T, Error>>,
    pub(super) decode: fn(&mut Reader<'_>) -> Result<T, Malformed>,
}

impl<T: Send> Caller for Waiting<T> {
    fn has_left(&self) -> bool {
        self.reply.is_closed()
    }

    fn answer(self: Box<Self>, answer: Result<Reader<'_>, Error>) -> Result<(), Malformed> {
        let decoded = match answer {
            Ok(mut record) => Ok((self.decode)(&mut record)?),
            Err(error) => Err(error),
        };
        self.reply.send(decoded).ok();
        Ok(())
    }
}

/// The number of a call, when it was sent, and who waits for its answer.
type InFlight = (i32, boot::Instant, Option<Box<dyn Caller>>);

pub(super) struct Connection {
    output: BytesMut,
    is_unflushed: bool,
    /// The calls in flight, by their numbers.
    in_flight: VecDeque<InFlight>,
    ping_in_flight: Option<boot::Instant>,
    /// The time at which the last frame was sent that the server has answered.
    pub(super) proved_at: boot::Instant,
    next_xid: i32,
    pub(super) sent_at: Instant,
    pub(super) is_closing: bool,
}

impl Connection {
    pub(super) fn new(now: Instant, proved_at: boot::Instant) -> Self {
        Self {
            output: BytesMut::new(),
            is_unflushed: false,
            in_flight: VecDeque::new(),
            ping_in_flight: None,
            proved_at,
            next_xid: 1,
            sent_at: now,
            is_closing: false,
        }
    }

    /// What a server has to know first. The answer to the ping shows that it serves the session.
    pub(super) fn start(&mut self, auth: Option<&[u8]>, last_zxid: i64, watches: &mut Watches) {
        if let Some(auth) = auth {
            self.put(xid::AUTH, auth);
        }
        let roots = watches.tree_roots();
        if roots.len() > 0 {
            self.put(xid::SET_WATCHES, &records::set_recursive_watches(last_zxid, roots));
        }
        self.ping(self.sent_at);
    }

    pub(super) fn has_room(&self) -> bool {
        let is_full = self.in_flight.len() >= ZOOKEEPER_CALLS_IN_FLIGHT_MAX;
        !self.is_closing && !is_full && self.output.len() < ZOOKEEPER_REQUEST_BYTES_MAX
    }

    pub(super) fn has_output(&self) -> bool {
        self.is_unflushed || !self.output.is_empty()
    }

    pub(super) fn ping(&mut self, now: Instant) {
        self.put(xid::PING, &records::request(Operation::Ping));
        // The first one stays: the next answer may be its.
        self.ping_in_flight.get_or_insert_with(boot_now);
        self.sent_at = now;
    }

    /// A call whose caller has left already is not sent.
    pub(super) fn send(&mut self, request: Request, watches: &mut Watches, now: Instant) {
        if request.caller.has_left() {
            return;
        }
        if let Some(watch) = request.watch {
            watches.add(watch);
        }
        self.put_call(&request.body, Some(request.caller), now);
    }

    /// Ends the session, after the calls that were sent.
    pub(super) fn close(&mut self, now: Instant) {
        self.put_call(&records::request(Operation::Close), None, now);
        self.is_closing = true;
    }

    fn put_call(&mut self, body: &[u8], caller: Option<Box<dyn Caller>>, now: Instant) {
        let number = self.next_xid;
        self.next_xid = number.checked_add(1).unwrap_or(1);
        self.put(number, body);
        self.in_flight.push_back((number, boot_now(), caller));
        self.sent_at = now;
    }

    fn put(&mut self, number: i32, body: &[u8]) {
        self.output.put_u32(u32::try_from(size_of::<i32>() + body.len()).unwrap_or(u32::MAX));
        self.output.put_i32(number);
        self.output.put_slice(body);
    }

    /// # Cancel safety
    ///
    /// Cancel safe: what was not written remains.
    pub(super) async fn write_to(&mut self, writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while !self.output.is_empty() {
            self.is_unflushed = true;
            if writer.write_buf(&mut self.output).await? == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        writer.flush().await?;
        self.is_unflushed = false;
        Ok(())
    }

    /// Takes a frame from the input, if there is a whole one, and returns the last transaction that it tells of.
    pub(super) fn receive(&mut self, input: &mut BytesMut, watches: &mut Watches) -> Result<Option<i64>, Loss> {
        let Some(frame) = take_frame(input)? else { return Ok(None) };
        let mut record = Reader::new(&frame);
        let (number, zxid, code) = (record.int()?, record.long()?, record.int()?);
        match number {
            xid::EVENT => {
                let (kind, path) = records::event(&mut record)?;
                // Before ZooKeeper 3.9 it is -1.
                watches.on_event(kind, &path, (zxid > 0).then_some(zxid));
                return Ok(Some(0));
            }
            xid::PING => self.proved_at = self.ping_in_flight.take().unwrap_or(self.proved_at).max(self.proved_at),
            xid::AUTH if code != 0 => return Err(Loss::Session(SessionState::AuthFailed)),
            xid::SET_WATCHES if code != 0 => {
                return Err(Loss::Connection(format!("cannot set watches again: {}", Error::from_code(code))));
            }
            xid::AUTH | xid::SET_WATCHES => {}
            number => self.on_answer(number, code, record)?,
        }
        Ok(Some(zxid))
    }

    fn on_answer(&mut self, number: i32, code: i32, record: Reader<'_>) -> Result<(), Loss> {
        let Some((_, sent_at, caller)) = self.in_flight.pop_front().filter(|(expected, ..)| *expected == number) else {
            return Err(Loss::Connection(format!("an answer to call {number} is not the next one")));
        };
        self.proved_at = self.proved_at.max(sent_at);
        let answer = if code == 0 { Ok(record) } else { Err(Error::from_code(code)) };
        let ended = match &answer {
            Err(Error::SessionExpired) => Some(SessionState::Expired),
            Err(Error::AuthFailed) => Some(SessionState::AuthFailed),
            Ok(_) | Err(_) => None,
        };
        match caller {
            Some(caller) => caller.answer(answer)?,
            None => return Err(Loss::Session(SessionState::Closed)),
        }
        ended.map_or(Ok(()), |state| Err(Loss::Session(state)))
    }
}

/// The clock of leases, which runs through suspend.
pub(super) fn boot_now() -> boot::Instant {
    Clock::boot().now()
}

/// `None` if a part of it is missing. The announced length costs nothing before the bytes are there.
fn take_frame(input: &mut BytesMut) -> Result<Option<Bytes>, Loss> {
    let Some(head) = input.first_chunk() else { return Ok(None) };
    let length = u32::from_be_bytes(*head);
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    if length > ZOOKEEPER_ANSWER_BYTES_MAX {
        return Err(Loss::Connection(format!("the server announces {length} bytes")));
    }
    if input.len() < size_of::<u32>() + length {
        return Ok(None);
    }
    input.advance(size_of::<u32>());
    Ok(Some(input.split_to(length).freeze()))
}
