#!/usr/bin/env python3
"""Publishes Mistral's notifications for `journeyman notifier` ([notifier.mistral]). Needs pika.

An engine of Mistral makes one publisher and keeps it: `start` when an execution starts or is run again, `notify` where it calls its
notifier, with the same data. As a program it reads one JSON a line from standard input, and publishes it:

    {"start": EXECUTION, "notify": PUBLISHERS}
    {"execution": EXECUTION, "notify": PUBLISHERS, "data": DATA, "event": EVENT, "state": STATE, "restart_count": 0}

AMQP_URI is the vhost, such as amqp://user:password@host/mistral_guaranteed_notifies, and URL_KEY the shared key.
"""

import hashlib
import hmac
import json
import os
import sys
import uuid

import pika

ENDED = ("SUCCESS", "ERROR", "CANCELLED")

WORKFLOW_EVENTS = {
    "SUCCESS": "WORKFLOW_SUCCEEDED",
    "ERROR": "WORKFLOW_FAILED",
    "CANCELLED": "WORKFLOW_CANCELLED",
    "PAUSED": "WORKFLOW_PAUSED",
}
TASK_EVENTS = {
    "SUCCESS": "TASK_SUCCEEDED",
    "ERROR": "TASK_FAILED",
    "CANCELLED": "TASK_CANCELLED",
    "PAUSED": "TASK_PAUSED",
    "SKIPPED": "TASK_SKIPPED",
}


def workflow_event(before, state):
    """The event of a workflow's change of state; None if it has none."""
    if state == "RUNNING":
        return {"PAUSED": "WORKFLOW_RESUMED", "ERROR": "WORKFLOW_RERUN"}.get(before, "WORKFLOW_LAUNCHED")
    return WORKFLOW_EVENTS.get(state)


def task_event(before, state):
    """The event of a task's change of state; None if it has none."""
    if state == "RUNNING":
        resumed = dict.fromkeys(("PAUSED", "IDLE", "WAITING"), "TASK_RESUMED")
        return {**resumed, "ERROR": "TASK_RERUN"}.get(before, "TASK_LAUNCHED")
    return TASK_EVENTS.get(state)


class GuaranteedPublisher:
    """One connection for all notifications, which waits until the broker has each on disk."""

    def __init__(self, uri, url_key, polling_time=0):
        self.parameters = pika.URLParameters(uri)
        self.url_key = url_key.encode()
        self.polling_time = polling_time
        self.channel = None

    def queue(self, execution, url):
        """The name of a queue has room for 255 bytes, so it has a keyed hash of the URL."""
        digest = hmac.new(self.url_key, url.encode(), hashlib.sha256).hexdigest()
        return f"{execution}.{digest[:32]}"

    def start(self, execution, publishers):
        """Makes the queues of an execution, also when it is run again: a queue that exists is kept."""
        for publisher in publishers:
            if publisher["type"] == "webhook":
                self._repeat(self._declare, self.queue(execution, publisher["url"]))

    def notify(self, execution, data, event, publishers, state, restart_count=0):
        """Publishes an event to the queue of each URL that wants it, and `end` if the execution is in a state that ends it.

        `data` is the body, as it is posted: Mistral has put the event into it.
        """
        for publisher in publishers:
            wanted = publisher.get("event_types")
            if publisher["type"] != "webhook" or event is None:
                continue
            queue = self.queue(execution, publisher["url"])
            if not wanted or event in wanted:
                message = {
                    "url": publisher["url"],
                    "headers": publisher.get("headers"),
                    "polling_time": self.polling_time,
                    "restart_count": restart_count,
                    "body": data,
                }
                self._publish(queue, message)
            if state in ENDED:
                self._publish(queue, {"end": True, "restart_count": restart_count})

    def _publish(self, queue, message):
        body = json.dumps(message)
        # Kept when it is published again after a lost connection, so that the notifier takes it once.
        message_id = str(uuid.uuid4())
        properties = pika.BasicProperties(delivery_mode=2, content_type="application/json", message_id=message_id)
        self._repeat(self._publish_once, queue, body, properties)

    def _publish_once(self, queue, body, properties):
        """Until the queue is there after the broker has confirmed the message.

        With `mandatory` a message comes back whose queue is gone. But RabbitMQ confirms one whose queue is deleted while the message is
        on the way to it.
        """
        try:
            self.channel.basic_publish("", queue, body, properties, mandatory=True)
            self.channel.queue_declare(queue, passive=True)
        except (pika.exceptions.UnroutableError, pika.exceptions.ChannelClosedByBroker):
            # The notifier has deleted the queue after the last `end`. `_repeat` publishes again.
            self._open()
            self._declare(queue)
            raise

    def _declare(self, queue):
        self.channel.queue_declare(queue, durable=True)

    def _open(self):
        if self.channel is None or self.channel.connection.is_closed:
            self.channel = pika.BlockingConnection(self.parameters).channel()
            self.channel.confirm_delivery()
        elif self.channel.is_closed:
            self.channel = self.channel.connection.channel()
            self.channel.confirm_delivery()

    def _repeat(self, act, *arguments):
        """Does it again, on a new connection if the old one is lost."""
        for attempt in range(5):
            try:
                self._open()
                return act(*arguments)
            except pika.exceptions.AMQPError:
                if attempt == 4:
                    raise


def main():
    publisher = GuaranteedPublisher(os.environ["AMQP_URI"], os.environ["URL_KEY"])
    for line in sys.stdin:
        call = json.loads(line)
        if "start" in call:
            publisher.start(call["start"], call["notify"])
        else:
            publisher.notify(
                call["execution"], call["data"], call["event"], call["notify"], call["state"], call.get("restart_count", 0)
            )
        print("ok", flush=True)


if __name__ == "__main__":
    main()
