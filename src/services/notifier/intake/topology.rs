//! The exchange that events are published to, and its queues.
//!
//! The exchange hashes the routing key of a message to one of its shards, so that a key keeps its order however many notifiers
//! there are. It is of the type `x-modulus-hash`: `x-consistent-hash` was seen to move 366 of 400 keys to other queues when RabbitMQ
//! 3.10.8 restarted, and this one none.

use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{Connection, ExchangeKind};

use journeyman_domain::limits::NOTIFIER_DELIVERY_LIMIT;
use journeyman_platform::amqp::{self, Broker, NameTooLong, header_table, text_value, to_short_string};

const HASH: &str = "x-modulus-hash";

#[derive(Debug, Clone)]
pub struct Topology {
    pub exchange: ShortString,
    /// An exchange and its queue: of messages that reach no shard, or cannot be taken.
    pub(super) dead: ShortString,
    pub(super) shards: Vec<ShortString>,
    /// A queue that does not exist with this number of shards.
    beyond: ShortString,
}

impl Topology {
    /// # Errors
    ///
    /// Fails if the name is too long.
    pub fn new(exchange: &str, shards: u16) -> Result<Self, NameTooLong> {
        let name = |suffix: &str| to_short_string("the name of a queue", &format!("{exchange}{suffix}"));
        let shard = |number: u16| name(&format!(".{number:03}"));
        Ok(Self {
            exchange: name("")?,
            dead: name(".dead")?,
            shards: (0..shards).map(shard).collect::<Result<_, _>>()?,
            beyond: shard(shards)?,
        })
    }

    /// Checks that everything is there, without declaring anything. Returns how many messages could not be taken.
    pub(super) async fn check(&self, broker: &Broker, connection: &Connection) -> Result<u32, String> {
        let look = Look { broker, connection };
        if !look.has_exchange(&self.exchange).await? {
            return Err(missing("exchange", &self.exchange));
        }
        for shard in &self.shards {
            look.count(shard).await?.ok_or_else(|| missing("queue", shard))?;
        }
        if look.count(&self.beyond).await?.is_some() {
            return Err(self.other_shards());
        }
        look.count(&self.dead).await?.ok_or_else(|| missing("queue", &self.dead))
    }

    /// Makes what is missing.
    ///
    /// # Errors
    ///
    /// Fails if something exists that differs, or the broker refuses.
    pub async fn set_up(&self, broker: &Broker, connection: &Connection) -> Result<(), String> {
        let look = Look { broker, connection };
        let (Some(first), Some(last)) = (self.shards.first(), self.shards.last()) else { return Ok(()) };
        let has_too_few = look.count(first).await?.is_some() && look.count(last).await?.is_none();
        if has_too_few || look.count(&self.beyond).await?.is_some() {
            return Err(self.other_shards());
        }
        // First, since the broker may lack its type.
        let kind = if self.shards.len() == 1 { ExchangeKind::Fanout } else { ExchangeKind::Custom(HASH.to_owned()) };
        let arguments = header_table([("alternate-exchange", text_value(self.dead.as_str()))]);
        look.declare_exchange(&self.exchange, kind, arguments).await?;
        look.declare_queue(&self.dead, self.dead_arguments()).await?;
        look.declare_exchange(&self.dead, ExchangeKind::Fanout, FieldTable::default()).await?;
        look.bind(&self.dead, &self.dead).await?;
        // The first one last: where it exists, all do.
        for shard in self.shards.iter().rev() {
            look.declare_queue(shard, self.shard_arguments()).await?;
            look.bind(shard, &self.exchange).await?;
        }
        Ok(())
    }

    fn shard_arguments(&self) -> FieldTable {
        let mut table = self.dead_arguments();
        for (name, value) in [
            ("x-single-active-consumer", AMQPValue::Boolean(true)),
            ("x-dead-letter-exchange", text_value(self.dead.as_str())),
            ("x-dead-letter-strategy", text_value("at-least-once")),
            // Delivery at least once needs it.
            ("x-overflow", text_value("reject-publish")),
        ] {
            table.insert(name.into(), value);
        }
        table
    }

    fn dead_arguments(&self) -> FieldTable {
        // Without a limit, what comes back goes to the end of a quorum queue, and RabbitMQ 4 has a limit of 20.
        let limit = AMQPValue::LongInt(NOTIFIER_DELIVERY_LIMIT);
        header_table([("x-queue-type", text_value("quorum")), ("x-delivery-limit", limit)])
    }

    fn other_shards(&self) -> String {
        format!(
            "{} was set up with another number of shards than `notifier.amqp.shards`; a change would mix up the order of \
             events, so set the old number, or another `notifier.amqp.queue`",
            self.exchange
        )
    }
}

fn missing(what: &str, name: &ShortString) -> String {
    format!("RabbitMQ has no {what} {name}: run `journeyman notifier setup` once, as a user that may configure it")
}

/// Each call has a channel of its own, which the broker closes with an error.
struct Look<'a> {
    broker: &'a Broker,
    connection: &'a Connection,
}

impl Look<'_> {
    /// The messages of a queue; `None` if it does not exist.
    async fn count(&self, queue: &ShortString) -> Result<Option<u32>, String> {
        let found = self.call("look up", queue, amqp::find_queue(self.connection, queue.clone())).await?;
        Ok(found.map(|queue| queue.message_count()))
    }

    async fn has_exchange(&self, exchange: &ShortString) -> Result<bool, String> {
        let found = self.call("look up", exchange, amqp::find_exchange(self.connection, exchange.clone())).await?;
        Ok(found.is_some())
    }

    async fn declare_queue(&self, name: &ShortString, arguments: FieldTable) -> Result<(), String> {
        let declaring =
            async { amqp::declare_queue(&self.connection.create_channel().await?, name.as_str(), arguments).await };
        self.call("declare", name, declaring).await.map(drop)
    }

    async fn declare_exchange(
        &self,
        name: &ShortString,
        kind: ExchangeKind,
        arguments: FieldTable,
    ) -> Result<(), String> {
        let declaring = async {
            let channel = self.connection.create_channel().await?;
            amqp::declare_exchange(&channel, name.as_str(), kind, arguments).await
        };
        self.call("declare", name, declaring).await.map(drop)
    }

    async fn bind(&self, queue: &ShortString, exchange: &ShortString) -> Result<(), String> {
        let binding = async {
            let channel = self.connection.create_channel().await?;
            amqp::bind_queue(&channel, queue.as_str(), exchange.as_str(), "").await
        };
        self.call("bind", queue, binding).await.map(drop)
    }

    /// `None` if there is no such queue or exchange.
    async fn call<T>(
        &self,
        operation: &str,
        name: &ShortString,
        call: impl Future<Output = lapin::Result<T>>,
    ) -> Result<Option<T>, String> {
        let mut refusal = None;
        let watched = async {
            call.await.inspect_err(|error| refusal = Some((amqp::reply_code(error), amqp::error_text(error))))
        };
        let ended = self.broker.bounded(&format!("{operation} {name}"), watched).await;
        match (ended, refusal) {
            (Ok(done), _) => Ok(Some(done)),
            (Err(_), Some((Some(amqp::NOT_FOUND), why))) if !why.contains("down or inaccessible") => Ok(None),
            (Err(_), Some((_, why))) if why.contains("exchange type") => Err(format!(
                "this RabbitMQ has no exchanges of the type {HASH}: enable its plugin (`rabbitmq-plugins enable \
                 rabbitmq_sharding`), or set `notifier.amqp.shards` to 1"
            )),
            (Err(_), Some((Some(amqp::PRECONDITION_FAILED), why))) => Err(format!(
                "{name} exists with other arguments ({why}); set another `notifier.amqp.queue`, or delete it once it is empty"
            )),
            (Err(error), _) => Err(error.message),
        }
    }
}
