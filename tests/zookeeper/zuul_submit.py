#!/usr/bin/env python3
"""Submits requests to Zuul's queues as its scheduler does, with its own MergeClient and ExecutorClient.

  zuul_submit.py --hosts H [--chroot C] merge --future      a merge; waits for its result and prints it
  zuul_submit.py … merge [--no-wait]                        a merge that is answered by an event; prints and acknowledges that
  zuul_submit.py … build [--zone Z] [--precedence N] [--bytes N] [--count N] [--wait]
                                                            builds; --wait prints their events, removes each when it is completed
  zuul_submit.py … cancel UUID…                             cancels builds: at once if no worker has them, by a flag otherwise
  zuul_submit.py … cancel-merge UUID…                       cancels merges that no merger has locked, and drops their waiters
  zuul_submit.py … resume UUID…                             resumes paused builds
  zuul_submit.py … remove UUID…                             removes builds
  zuul_submit.py … list merger|executor                     the requests in the order in which a worker takes them
  zuul_submit.py … events [--count N] [--no-ack]            the events of the pipeline's result queue

Prints a line of JSON a result. Exits with 1 if --timeout seconds were not enough, or a build or merge is not there."""
import configparser
import sys
import time
import uuid
from types import SimpleNamespace

from opentelemetry import trace
from zuul.executor.client import ExecutorClient
from zuul.merger.client import MergeClient
from zuul.model import BuildCompletedEvent, BuildRequest
from zuul.zk.event_queues import JobResultFuture, PipelineResultEventQueue
from zuul.zk.executor import ExecutorApi
from zuul.zk.merger import MergerApi
sys.dont_write_bytecode = True  # The folder is one of the sources.
from zuul_client import build_set, connect, digest, finish, noise, parser, say, scheduler


class Merges(MergerApi):
    """Remembers the request: MergeClient returns none without a future."""

    def submit(self, request, *args, **more):
        future = super().submit(request, *args, **more)
        self.submitted = request
        return future


class Merger(MergeClient):
    _merger_api_class = Merges


class Builds(ExecutorApi):
    flagged = False

    def requestCancel(self, request):
        self.flagged = True
        super().requestCancel(request)


class Executor(ExecutorClient):
    _executor_api_class = Builds


def mergers(client):
    merger = Merger(configparser.ConfigParser(), scheduler(client))
    merger.merger_api.cache.ensureReady()
    merger.merger_api.waitForSync()
    return merger


def executors(client):
    executor = Executor(None, scheduler(client))
    # A zone that was created after the session began has a queue only once it is asked for.
    for zone in executor.executor_api._getAllZones():
        executor.executor_api.zone_queues[zone].cache.ensureReady()
    executor.executor_api.waitForSync()
    return executor


def follow(client, args, done):
    """Prints and acknowledges the events of the result queue, until done says so of one. Returns whether that was in time."""
    queue = PipelineResultEventQueue(client, args.tenant, args.pipeline)
    end = time.monotonic() + args.timeout
    seen = set()
    while time.monotonic() < end:
        for event in queue:
            node = event.ack_ref.path.rsplit("/", 1)[1]
            if node in seen:
                continue
            seen.add(node)
            say(type(event).__name__, node=node, data=event.toDict())
            enough = done(event)
            if not args.no_ack:
                queue.ack(event)
            if enough:
                return True
        time.sleep(0.02)
    say("timeout")
    return False


def merge(client, args):
    merger = mergers(client)
    params = {"items": [], "files": None, "dirs": None, "repo_state": None, "branches": None, "padding": noise(args.bytes)}
    waiting = {}
    for _ in range(args.count):
        owner = None if args.future else build_set(args, uuid.uuid4().hex)
        future = merger.submitJob(args.type, params, owner, args.precedence, needs_result=args.future,
                                  event=SimpleNamespace(zuul_event_id="e1"))
        request = merger.merger_api.submitted
        say("submitted", uuid=request.uuid, path=request.path, params_sha256=digest(params))
        waiting[request.uuid] = future
    if args.no_wait:
        return True
    if args.future:
        end = time.monotonic() + args.timeout
        for name, future in waiting.items():
            if not future.wait(max(0.01, end - time.monotonic())):
                say("timeout", uuid=name)
                return False
            say("result", uuid=name, data=future.data, merged=future.merged, updated=future.updated)
        return True

    def done(event):
        waiting.pop(getattr(event, "request_uuid", None), None)
        return not waiting

    return follow(client, args, done)


def build(client, args):
    api = executors(client).executor_api
    waiting = {}
    for _ in range(args.count):
        params = {"zuul": {"job": "j", "build": args.uuid}, "zuul_event_id": "e1", "padding": noise(args.bytes)}
        with trace.get_tracer("zuul").start_as_current_span("Build"):
            request = BuildRequest(args.uuid or uuid.uuid4().hex, args.zone, uuid.uuid4().hex, uuid.uuid4().hex, args.tenant,
                                   args.pipeline, "e1", args.precedence)
        api.submit(request, params)
        say("submitted", uuid=request.uuid, path=request.path, params_sha256=digest(params))
        waiting[request.uuid] = request

    def done(event):
        if isinstance(event, BuildCompletedEvent) and event.build_uuid in waiting:
            api.remove(waiting.pop(event.build_uuid))
        return not waiting

    return not args.wait or follow(client, args, done)


def cancel(client, args):
    executor = executors(client)
    found = True
    for name in args.uuid:
        request = executor.executor_api.getRequest(name)
        executor.executor_api.flagged = False
        stub = SimpleNamespace(uuid=name, job="j", zuul_event_id="e1", build_set=build_set(args, None),
                               build_request_ref=request and request.path, updateAttributes=lambda *_, **__: None)
        stub.build_set.item.manager.current_context = None
        canceled = executor.cancel(stub)
        say("cancel", uuid=name, canceled=canceled, flagged=executor.executor_api.flagged)
        found = found and canceled
    return found


def cancel_merge(client, args):
    merger = mergers(client)
    api = merger.merger_api
    for name in args.uuid:
        merger.cancel(JobResultFuture(client, f"{api.REQUEST_ROOT}/{name}", f"{api.RESULT_ROOT}/{name}", f"{api.WAITER_ROOT}/{name}"))
        say("cancel", uuid=name, gone=not client.client.exists(f"{api.REQUEST_ROOT}/{name}"))
    return True


def resume(client, args):
    executor = executors(client)
    found = True
    for name in args.uuid:
        request = executor.executor_api.getRequest(name)
        resumed = executor.resumeBuild(SimpleNamespace(zuul_event_id="e1", build_request_ref=request and request.path))
        say("resume", uuid=name, resumed=resumed)
        found = found and resumed
    return found


def remove(client, args):
    executor = executors(client)
    found = True
    for name in args.uuid:
        request = executor.executor_api.getRequest(name)
        executor.removeBuild(SimpleNamespace(uuid=name, zuul_event_id="e1", build_request_ref=request and request.path))
        say("remove", uuid=name, found=request is not None)
        found = found and request is not None
    return found


def list_requests(client, args):
    api = mergers(client).merger_api if args.queue == "merger" else executors(client).executor_api
    requests = api.inState()
    for request in requests:
        children = client.client.get_children(request.path)
        say("request", path=request.path, locked=api.isLocked(request), children=sorted(children), data=request.toDict())
    say("end", count=len(requests))
    return True


def events(client, args):
    left = args.count

    def done(_):
        nonlocal left
        left -= 1
        return left == 0

    return follow(client, args, done)


def main():
    top = parser(__doc__)
    top.set_defaults(no_ack=False)
    commands = top.add_subparsers(required=True)

    def command(name, run):
        one = commands.add_parser(name)
        one.set_defaults(run=run)
        one.add_argument("--timeout", type=float, default=30, help="seconds")
        return one

    one = command("merge", merge)
    one.add_argument("--type", default="merge", choices=["merge", "cat", "refstate", "fileschanges"])
    one.add_argument("--future", action="store_true")
    one.add_argument("--precedence", type=int, default=0)
    one.add_argument("--bytes", type=int, default=0, help="of padding in the params")
    one.add_argument("--count", type=int, default=1)
    one.add_argument("--no-wait", action="store_true")
    one = command("build", build)
    one.add_argument("--zone")
    one.add_argument("--precedence", type=int, default=200)
    one.add_argument("--bytes", type=int, default=0, help="of padding in the params")
    one.add_argument("--count", type=int, default=1)
    one.add_argument("--uuid", help="instead of a random one")
    one.add_argument("--wait", action="store_true")
    for name, run in [("cancel", cancel), ("cancel-merge", cancel_merge), ("resume", resume), ("remove", remove)]:
        command(name, run).add_argument("uuid", nargs="+")
    command("list", list_requests).add_argument("queue", choices=["merger", "executor"])
    one = command("events", events)
    one.add_argument("--count", type=int, default=1)
    one.add_argument("--no-ack", action="store_true")
    args = top.parse_args()
    client = connect(args)
    finish(client, 0 if args.run(client, args) else 1)


if __name__ == "__main__":
    main()
