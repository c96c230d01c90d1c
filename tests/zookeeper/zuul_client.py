"""What the programs beside it share: the arguments that name a server, a session of Zuul's own client, and a line of JSON a result."""
import argparse
import base64
import configparser
import hashlib
import json
import logging
import os
import random
import sys
import warnings
from types import SimpleNamespace

import zuul.lib.tracing as tracing
from zuul.zk import ZooKeeperClient
from zuul.zk.components import COMPONENT_REGISTRY


def parser(doc):
    top = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--hosts", required=True, help="HOST:PORT of the server, of its TLS port with --tls-dir")
    top.add_argument("--chroot", default="", help="a path of one level, created if it is missing")
    top.add_argument("--tls-dir", help="a folder with ca.pem, client.pem and client.key")
    top.add_argument("--session-timeout", type=float, default=10, help="seconds")
    top.add_argument("--model-api", type=int, help="write data as a cluster whose oldest member has this model API")
    top.add_argument("--tenant", default="t")
    top.add_argument("--pipeline", default="p")
    top.add_argument("--verbose", action="store_true", help="what Zuul logs, on standard error")
    return top


def connect(args):
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.ERROR)
    # The first node creates the chroot.
    warnings.filterwarnings("ignore", message="No chroot path exists")
    # A daemon of Zuul has a tracer, which puts a trace id of 128 bits into each request.
    tracing.Tracing(configparser.ConfigParser())
    tls = {}
    if args.tls_dir:
        names = {"tls_ca": "ca.pem", "tls_cert": "client.pem", "tls_key": "client.key"}
        tls = {key: os.path.join(args.tls_dir, name) for key, name in names.items()}
    client = ZooKeeperClient(args.hosts + args.chroot, timeout=args.session_timeout, **tls)
    client.connect()
    registry = COMPONENT_REGISTRY.create(client)
    if args.model_api is not None:
        registry.getMinimumModelApi = lambda: args.model_api
        registry.model_api = args.model_api
    return client


def say(event, **more):
    # One write, since several threads of a worker print.
    sys.stdout.write(json.dumps({"event": event, **more}, sort_keys=True) + "\n")
    sys.stdout.flush()


def finish(client, status=0):
    """Closes the session, so that its ephemeral nodes go at once. Threads of Zuul's caches would keep the process alive."""
    client.disconnect()
    sys.stdout.flush()
    os._exit(status)


def noise(size):
    """Text of this many bytes, the same each time, which zlib makes little smaller."""
    return base64.b64encode(random.Random(size).randbytes(size * 3 // 4 + 3))[:size].decode()


def digest(value):
    """The SHA-256 of bytes, or of a value as Zuul writes it."""
    if not isinstance(value, bytes):
        value = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(value).hexdigest()


def scheduler(client):
    """As much of a scheduler as Zuul's clients ask for."""
    return SimpleNamespace(zk_client=client)


def build_set(args, uuid):
    manager = SimpleNamespace(tenant=SimpleNamespace(name=args.tenant), pipeline=SimpleNamespace(name=args.pipeline))
    return SimpleNamespace(uuid=uuid, span_info=None, item=SimpleNamespace(manager=manager))
