#!/usr/bin/env python3
"""A worker as others have written it for the known controller, with pika alone: it knows its variables, reports started, ready and
request-received, answers, and acknowledges then."""
import json
import os
import signal
import sys
import time

import pika

key = os.environ["WORKER_KEY"]
worker = os.environ["WORKER_ID"]
pool = os.environ.get("WORKER_POOL", "core")
queue = os.environ.get("WORKER_REQUESTS_QUEUE", f"{pool}-req-{key}")
exchange = os.environ.get("WORKER_ACTIVITY_EXCHANGE", f"{pool}-activity-xchg")

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
connection = pika.BlockingConnection(pika.URLParameters(os.environ["WORKER_AMQP_URI"].rstrip(";")))
reports = connection.channel()


def report(event):
    headers = {"x-event": event, "x-worker-id": worker}
    reports.basic_publish(exchange, key, b"", pika.BasicProperties(headers=headers))


def request(channel, method, properties, body):
    report("request-received")
    path = properties.headers["x-rpc-path"]
    assert isinstance(path, bytes), f"{path!r} is no byte array"
    answer = json.dumps({"echo": json.loads(body), "key": key}, separators=(",", ":")).encode()
    headers = {"x-status": b"ok"}
    answered = pika.BasicProperties(correlation_id=properties.correlation_id, headers=headers)
    channel.basic_publish("", properties.reply_to, answer, answered)
    channel.basic_ack(method.delivery_tag)


report("started")
report("ready")
while True:
    requests = connection.channel()
    requests.basic_qos(prefetch_count=1)
    try:
        requests.basic_consume(queue, request)
        requests.start_consuming()
        break  # The consumer was canceled: the queue is gone.
    except pika.exceptions.ChannelClosedByBroker as closed:
        if closed.reply_code != 404:
            raise
        time.sleep(0.2)  # The queue is not there yet.
