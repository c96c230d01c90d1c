#!/usr/bin/env python3
"""A client as others have written it for the known controller, with pika alone: known_client.py POOL KEY COUNT. It publishes requests as
the recorded client does, one after the other, and prints each answer's status and body."""
import os
import sys
import uuid

import pika

pool, key, count = sys.argv[1], os.fsencode(sys.argv[2]), int(sys.argv[3])
connection = pika.BlockingConnection(pika.URLParameters(os.environ["AMQP_URI"]))
channel = connection.channel()
answers = {}


def answered(_channel, _method, properties, body):
    answers[properties.correlation_id] = (properties.headers["x-status"], body)


channel.basic_consume("amq.rabbitmq.reply-to", answered, auto_ack=True)
trace = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
for number in range(count):
    correlation_id = str(uuid.uuid4())
    properties = pika.BasicProperties(
        reply_to="amq.rabbitmq.reply-to",
        correlation_id=correlation_id,
        headers={"x-rpc-path": b"/echo", "traceparent": trace},
    )
    channel.basic_publish(f"{pool}-req-xchg", key, str(number).encode(), properties, mandatory=True)
    while correlation_id not in answers:
        connection.process_data_events(time_limit=1)
    status, body = answers.pop(correlation_id)
    assert isinstance(status, bytes), f"{status!r} is no byte array"
    print(status.decode(), body.decode(), flush=True)
