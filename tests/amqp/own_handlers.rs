//! Programs with handlers of their own, on a RabbitMQ.

use std::time::Duration;

use journeyman::client::{RpcClient, RpcRequest};
use journeyman::handler::{Context, ExecuteError, PayloadHandler, PrepareError};
use journeyman::task::Reply;
use journeyman_platform::amqp::lapin::options::QueueDeclareOptions;
use journeyman_platform::amqp::lapin::types::FieldTable;
use serde_json::{Value, json};

use crate::amqp::support::{broker, shared_uri, within};

struct Double;

impl PayloadHandler for Double {
    type Payload = i64;
    type Prepared = i64;

    fn payload_schema(&self) -> Value {
        json!({"type": "integer"})
    }

    async fn prepare(&self, number: i64, _: &Context) -> Result<i64, PrepareError> {
        Ok(number)
    }

    async fn execute(&self, number: i64, context: &Context) -> Result<(), ExecuteError> {
        let reply = context.set_reply(Reply::ok((number * 2).to_string().into_bytes()));
        reply.map_err(|error| ExecuteError::internal(error.to_string()))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_of_three_lines_serves_the_requests_of_a_queue() {
    let Some(uri) = shared_uri() else { return };
    let (folder, broker) = (tempfile::tempdir().expect("a folder"), broker(&uri));
    let connection = broker.connect("a test").await.expect("a connection");
    let channel = connection.create_channel().await.expect("a channel");
    let queue = format!("doubles-{}", uuid::Uuid::new_v4());
    let options = QueueDeclareOptions { durable: true, auto_delete: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await.expect("a queue");
    let uri_file = folder.path().join("uri");
    std::fs::write(&uri_file, uri).expect("written");
    let worker = journeyman::serve("double", Double)
        .amqp(&queue)
        .set("amqp.uri_file", &uri_file.to_string_lossy())
        .set("worker.work_dir", &folder.path().join("work").to_string_lossy())
        .build()
        .expect("the configuration is good");
    let control = worker.control();
    let calling = async {
        let client = RpcClient::new(broker, "a test");
        let request = RpcRequest {
            routing_key: queue.clone(),
            body: b"21".to_vec(),
            timeout: Duration::from_secs(60),
            ..RpcRequest::default()
        };
        let reply = within("a reply", client.call(&request)).await.expect("a reply");
        control.drain().await;
        reply
    };
    let (exit, reply) = tokio::join!(worker.run(), calling);
    assert_eq!(reply.body, b"42");
    exit.expect("it drained");
}
