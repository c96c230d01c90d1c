#!/usr/bin/env python3
"""Sends a request to an AMQP queue and prints the reply: ask.py QUEUE PATH BODY. Needs pika. WORKER_AMQP_URI is the broker."""

import os
import sys
import uuid

import pika

queue, path, body = sys.argv[1:4]
address = os.environ.get("WORKER_AMQP_URI", "amqp://guest:guest@127.0.0.1:5672/%2f")
connection = pika.BlockingConnection(pika.URLParameters(address))
channel = connection.channel()
try:
    channel.queue_declare(queue, passive=True)
except pika.exceptions.ChannelClosedByBroker:
    # Usually done by a controller. RabbitMQ 4.3 refuses a queue that is not durable.
    channel = connection.channel()
    channel.queue_declare(queue, durable=True)
correlation_id = str(uuid.uuid4())


def on_reply(channel, _method, properties, reply):
    if properties.correlation_id != correlation_id:
        return
    print(properties.headers["x-status"].decode(), reply.decode(), flush=True)
    if not properties.headers.get("x-non-terminating-response"):
        channel.stop_consuming()


channel.basic_consume("amq.rabbitmq.reply-to", on_reply, auto_ack=True)
channel.basic_publish(
    "",
    queue,
    body,
    pika.BasicProperties(
        reply_to="amq.rabbitmq.reply-to", correlation_id=correlation_id, headers={"x-rpc-path": path.encode()}
    ),
    mandatory=True,
)
channel.start_consuming()
