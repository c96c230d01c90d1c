#!/usr/bin/env python3
"""Zuul's own classes for what it keeps in ZooKeeper besides job queues, one command each.

  zuul_tools.py --hosts H [--chroot C] register KIND [--name HOSTNAME] [--set KEY=JSON]…     a component; holds it
  zuul_tools.py … components [KIND]                   the registry, and the model API of the cluster
  zuul_tools.py … lock KIND PATH [--identifier I] [--now] [--timeout S]
      a lock of the kind lock, read, write, session, session-read or session-write; holds it
  zuul_tools.py … contenders PATH                     the contenders of a lock, its owner first
  zuul_tools.py … election PATH                       a session-aware election; holds the lead
  zuul_tools.py … semaphore acquire|release|holders|leaks NAME… [--max N] [--buildset PATH] [--job J] [--global]
  zuul_tools.py … ltime
  zuul_tools.py … shards write|read PATH [--bytes N] [--text T]      in the old format with --model-api 30, before the command
  zuul_tools.py … events put|list|ack QUEUE [--bytes N] [--count N] [--wait] [--error TEXT]
      of a queue of the pipeline (result, management, trigger), the tenant (tenant-management, tenant-trigger) or a connection (connection).
      put --wait waits until a management event is acknowledged; ack --error says that it failed.

A command that holds something keeps it until its standard input ends, and answers each line there with its state; for a component, a line
KEY=JSON sets an attribute. Prints a line of JSON a result; exits with 1 if a lock, a semaphore or an answer was not obtained."""
import json
import logging
import sys
import zlib
from types import SimpleNamespace

from kazoo.exceptions import LockTimeout, NoNodeError
from kazoo.recipe.lock import Lock, ReadLock, WriteLock
from zuul import model
from zuul.zk import event_queues, sharding
from zuul.zk.components import COMPONENT_REGISTRY, ComponentRegistry
from zuul.zk.election import SessionAwareElection
from zuul.zk.locks import SessionAwareLock, SessionAwareReadLock, SessionAwareWriteLock
from zuul.zk.semaphore import SemaphoreHandler
sys.dont_write_bytecode = True  # The folder is one of the sources.
from zuul_client import connect, digest, finish, noise, parser, say

LOCKS = {"lock": Lock, "read": ReadLock, "write": WriteLock, "session": SessionAwareLock, "session-read": SessionAwareReadLock,
         "session-write": SessionAwareWriteLock}


def hold(answer):
    for line in sys.stdin:
        answer(line.strip())


def register(client, args):
    component = ComponentRegistry.COMPONENT_CLASSES[args.kind](client, args.name, version="14.3.0")

    def assign(text):
        key, value = text.split("=", 1)
        return key, json.loads(value)

    component.content.update(state=component.RUNNING)
    component.content.update(assign(one) for one in args.set)
    component.register(*([args.model_api] if args.model_api is not None else []))
    say("registered", path=component.path)

    def answer(line):
        if line:
            setattr(component, *assign(line))
        say("component", path=component.path, data=component.content)

    hold(answer)
    return True


def components(client, args):
    registry = COMPONENT_REGISTRY.registry
    for kind, found in sorted(registry.all()):
        for component in found:
            if args.kind in (None, kind):
                say("component", kind=kind, path=component.path, data=component.content)
    say("cluster", model_api=registry.model_api)
    return True


def lock(client, args):
    one = LOCKS[args.kind](client.client, args.path, args.identifier)
    try:
        acquired = one.acquire(blocking=not args.now, timeout=args.timeout)
    except LockTimeout:
        acquired = False
    say("acquired" if acquired else "refused", node=one.node if acquired else None)

    def state(event):
        say(event, valid=one.is_still_valid() if hasattr(one, "is_still_valid") else None, contenders=one.contenders())

    if acquired:
        hold(lambda _: state("held"))
        valid = one.is_still_valid() if hasattr(one, "is_still_valid") else None
        one.release()
        say("released", valid=valid)
    return acquired


def contenders(client, args):
    # Only a write lock counts those that want to read.
    say("contenders", contenders=WriteLock(client.client, args.path).contenders())
    return True


def election(client, args):
    one = SessionAwareElection(client.client, args.path, args.identifier)

    def lead():
        say("elected", node=one.lock.node)
        hold(lambda _: say("leading", valid=one.is_still_valid(), contenders=one.contenders()))

    one.run(lead)
    say("resigned", valid=one.is_still_valid())
    return True


def semaphore(client, args):
    layout = SimpleNamespace(getSemaphore=lambda _, name: SimpleNamespace(name=name, max=args.max, global_scope=args.everywhere))
    handler = SemaphoreHandler(client, None, args.tenant, layout, None)
    infos = [handler.getSemaphoreInfo(SimpleNamespace(name=name, resources_first=False)) for name in args.names]
    handle = {"buildset_path": args.buildset, "job_name": args.job}
    acquired = True
    if args.action == "acquire":
        acquired = handler.acquireFromInfo(handler.log, infos, handle)
    elif args.action == "release":
        handler.releaseFromInfo(handler.log, event_queues.TenantManagementEventQueue(client, args.tenant), infos, handle)
    elif args.action == "leaks":
        handler.cleanupLeaks()
    for info in infos:
        try:
            holders = handler.getHolders(info["path"])[0]
        except NoNodeError:
            holders = None
        say("semaphore", name=info["name"], path=info["path"], holders=holders)
    say("end", acquired=acquired)
    return acquired


def ltime(client, _):
    say("ltime", ltime=client.getCurrentLtime())
    return True


def shards(client, args):
    if args.action == "write":
        data = (args.text or noise(args.bytes)).encode()
        with sharding.BufferedShardWriter(client.client, args.path) as stream:
            stream.write(zlib.compress(data))
    else:
        with sharding.BufferedShardReader(client.client, args.path) as stream:
            data = zlib.decompress(stream.read())
    text = data.decode(errors="replace") if len(data) <= 1000 else None
    say("shards", bytes=len(data), sha256=digest(data), text=text, nodes=sorted(client.client.get_children(args.path)))
    return True


def queue_of(client, args):
    tenant, pipeline = args.tenant, args.pipeline
    connections = SimpleNamespace(getTriggerEventClass=lambda _: model.TriggerEvent)
    return {
        "result": lambda: event_queues.PipelineResultEventQueue(client, tenant, pipeline),
        "management": lambda: event_queues.PipelineManagementEventQueue(client, tenant, pipeline),
        "trigger": lambda: event_queues.PipelineTriggerEventQueue(client, tenant, pipeline, connections),
        "tenant-management": lambda: event_queues.TenantManagementEventQueue(client, tenant),
        "tenant-trigger": lambda: event_queues.TenantTriggerEventQueue(client, connections, tenant),
        "connection": lambda: event_queues.ConnectionEventQueue(client, "c", None),
    }[args.queue]()


def put(queue, args):
    if args.queue == "result":
        data = {"result": "SUCCESS", "end_time": 0.0, "data": {"padding": noise(args.bytes)}}
        queue.put(model.BuildCompletedEvent("b", "bs", "j", "/zuul/executor/unzoned/requests/b", data, "e1"))
    elif "management" in args.queue:
        return queue.put(model.SemaphoreReleaseEvent("s" + noise(args.bytes)), needs_result=args.wait)
    elif "trigger" in args.queue:
        event = model.TriggerEvent()
        event.data = {"padding": noise(args.bytes)}
        queue.put("driver", event)
    else:
        queue.put({"payload": noise(args.bytes)})
    return None


def events(client, args):
    queue = queue_of(client, args)
    done = True
    if args.action == "put":
        for _ in range(args.count):
            future = put(queue, args)
            say("put")
            if future:
                try:
                    done = future.wait(args.timeout)
                    say("answered" if done else "timeout", data=future.data)
                except RuntimeError as error:
                    say("answered", error=str(error))
        return done
    for event in queue:
        path = event.ack_ref.path
        data = event.data if args.queue == "connection" else event.toDict()
        say(type(event).__name__, path=path, data=data, ltime=getattr(event, "zuul_event_ltime", None))
        if args.action == "ack":
            if args.error:
                event.exception(args.error)
            queue.ack(event)
    say("end", left=len(queue))
    return True


def main():
    top = parser(__doc__)
    commands = top.add_subparsers(required=True)

    def command(name, run):
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        return one

    one = command("register", register)
    one.add_argument("kind", choices=sorted(ComponentRegistry.COMPONENT_CLASSES))
    one.add_argument("--name", default="zuul-tools")
    one.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    command("components", components).add_argument("kind", nargs="?")
    one = command("lock", lock)
    one.add_argument("kind", choices=sorted(LOCKS))
    one.add_argument("path")
    one.add_argument("--identifier")
    one.add_argument("--now", action="store_true", help="do not wait")
    one.add_argument("--timeout", type=float)
    command("contenders", contenders).add_argument("path")
    one = command("election", election)
    one.add_argument("path")
    one.add_argument("--identifier")
    one = command("semaphore", semaphore)
    one.add_argument("action", choices=["acquire", "release", "holders", "leaks"])
    one.add_argument("names", nargs="+", metavar="NAME")
    one.add_argument("--max", type=int, default=1)
    one.add_argument("--buildset", default="/zuul/tenant/t/pipeline/p/item/i/buildset/b")
    one.add_argument("--job", default="j")
    one.add_argument("--global", action="store_true", dest="everywhere")
    command("ltime", ltime)
    one = command("shards", shards)
    one.add_argument("action", choices=["write", "read"])
    one.add_argument("path")
    one.add_argument("--bytes", type=int, default=0)
    one.add_argument("--text")
    one = command("events", events)
    one.add_argument("action", choices=["put", "list", "ack"])
    one.add_argument("queue", choices=["result", "management", "trigger", "tenant-management", "tenant-trigger", "connection"])
    one.add_argument("--bytes", type=int, default=0)
    one.add_argument("--count", type=int, default=1)
    one.add_argument("--wait", action="store_true")
    one.add_argument("--timeout", type=float, default=30)
    one.add_argument("--error")
    args = top.parse_args()
    client = connect(args)
    logging.getLogger("zuul.zk.SemaphoreHandler").setLevel(logging.CRITICAL)
    finish(client, 0 if args.run(client, args) else 1)


if __name__ == "__main__":
    main()
