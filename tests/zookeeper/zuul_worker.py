#!/usr/bin/env python3
"""A worker of Zuul's queues: its own MergeServer and ExecutorServer, with a payload that only sleeps and makes up a result.

  zuul_worker.py --hosts H [--chroot C] merger [--count N] [--sleep S] [--bytes N] [--rate]
  zuul_worker.py … executor [--zone Z] [--allow-unzoned] [--slots N] [--pause] [--result SUCCESS] [--count N] …

It ends after --count requests, after --timeout seconds (exit status 1), or at SIGTERM, when builds are reported as ABORTED.
--pause pauses each build until it is resumed. --rate prints how many requests a second were completed.
--die-after POINT ends the process without closing its session, so that its locks stay until --session-timeout. The points, in order:
  merger:    lock params running result completed unlock remove
  executor:  lock running params started paused completed unlock
Prints a line of JSON when a request is taken and one when it is completed."""
import os
import signal
import sys
import threading
import time

from zuul.executor.server import ExecutorServer
from zuul.merger.server import BaseMergeServer
from zuul.version import release_string
from zuul.zk.components import ExecutorComponent, MergerComponent
from zuul.zk.event_queues import PipelineResultEventQueue
from zuul.zk.executor import ExecutorApi
from zuul.zk.merger import MergerApi
sys.dont_write_bytecode = True  # The folder is one of the sources.
from zuul_client import connect, digest, finish, noise, parser, say

args = None


def reached(point):
    if args.die_after == point:
        say("died", point=point)
        os._exit(9)


class Dying:
    """Mixed into a queue: the steps after which the process may end."""

    def lock(self, request, *more, **named):
        locked = super().lock(request, *more, **named)
        if locked:
            reached("lock")
        return locked

    def update(self, request):
        super().update(request)
        reached(request.state)

    def clearParams(self, request):
        super().clearParams(request)
        reached("params")

    def reportResult(self, request, result):
        super().reportResult(request, result)
        reached("result")

    def unlock(self, request):
        super().unlock(request)
        reached("unlock")

    def remove(self, request):
        super().remove(request)
        reached("remove")


class Merges(Dying, MergerApi):
    pass


class Builds(Dying, ExecutorApi):
    pass


class Results(PipelineResultEventQueue):
    points = {"BuildStartedEvent": "started", "BuildCompletedEvent": "completed", "MergeCompletedEvent": "result",
              "FilesChangesCompletedEvent": "result"}

    def put(self, event, updater=None):
        super().put(event, updater)
        reached(self.points.get(type(event).__name__, "event"))


class Tally:
    """Counts requests, and knows when there were enough."""

    def __init__(self):
        self.lock = threading.Lock()
        self.taken = self.done = 0
        self.first = self.last = None
        self.enough = threading.Event()

    def began(self):
        with self.lock:
            self.taken += 1
            if self.first is None:
                self.first = time.monotonic()

    def ended(self):
        with self.lock:
            self.done += 1
            self.last = time.monotonic()
            if args.count and self.done >= args.count:
                self.enough.set()

    def rate(self):
        seconds = self.last - self.first if self.done else 0
        say("rate", count=self.done, seconds=seconds, per_second=self.done / seconds if seconds else None)


class Merger(BaseMergeServer):
    def __init__(self, client, tally):
        self.zk_client = client
        self.tally = tally
        self.hostname = args.hostname
        self.component_info = MergerComponent(client, self.hostname, version=release_string)
        self.result_events = Results.createRegistry(client)
        self.merger_thread = threading.Thread(target=self.runMerger, daemon=True)
        self.merger_loop_wake_event = threading.Event()
        self._merger_running = False
        self._merger_paused = False
        self.merger_api = Merges(client, merge_request_callback=self.merger_loop_wake_event.set)

    def executeMergeJob(self, request, params):
        self.tally.began()
        say("taken", uuid=request.uuid, data=request.toDict(), params_sha256=digest(params))
        time.sleep(args.sleep)
        if args.fail:
            raise RuntimeError("asked to fail")
        more = {
            "merge": {"merged": True, "commit": "c" * 40, "files": [noise(args.bytes)], "repo_state": {}, "errors": []},
            "cat": {"updated": True, "files": {"zuul.yaml": noise(args.bytes)}},
            "refstate": {"updated": True, "repo_state": {"r": noise(args.bytes)}, "item_in_branches": []},
            "fileschanges": {"updated": True, "files": [[noise(args.bytes)]]},
        }
        return {"elapsed_time": args.sleep, **more[request.job_type]}

    def completeMergeJob(self, request, result):
        super().completeMergeJob(request, result)
        # It keeps the lock of a request that it does not report.
        say("completed", uuid=request.uuid, reported=request.lock is None, result_sha256=digest(result))
        self.tally.ended()
        if self.tally.enough.is_set():
            self._merger_running = False

    def abort(self):
        self._merger_running = False


class FakeJob:
    """What ExecutorServer asks of its AnsibleJob."""
    retry_limit = False

    def __init__(self, server, request, params):
        self.server = server
        self.request = request
        self.params = params
        self.paused = False
        self.stopped = threading.Event()
        self.resumed = threading.Event()
        self.time_starting_build = time.monotonic()
        self.end_time = None

    def run(self):
        threading.Thread(target=self.execute, daemon=True).start()

    def execute(self):
        say("taken", uuid=self.request.uuid, data=self.request.toDict(), params_sha256=digest(self.params))
        self.server.startBuild(self.request, time.time())
        self.stopped.wait(args.sleep)
        if args.pause and not self.stopped.is_set():
            self.paused = True
            data = {"paused": True, "data": {"a": 1}, "secret_data": {}}
            self.server.pauseBuild(self.request, data)
            say("paused", uuid=self.request.uuid)
            self.resumed.wait()
        result = {"result": "ABORTED" if self.stopped.is_set() else args.result, "warnings": [], "unreachable": False,
                  "data": {"padding": noise(args.bytes)}, "secret_data": {}}
        try:
            self.server.completeBuild(self.request, result)
            # It keeps the lock of a request that it does not report.
            reported, error = self.request.lock is None, None
        except Exception as why:
            reported, error = False, type(why).__name__
        say("completed", uuid=self.request.uuid, reported=reported, error=error, result=result["result"],
            data_sha256=digest(result["data"]))
        self.server.finishJob(self.request.uuid)

    def stop(self, reason=None):
        self.stopped.set()
        self.resume()

    def resume(self):
        if not self.paused:
            return
        self.paused = False
        self.server.resumeBuild(self.request)
        self.resumed.set()


class Executor(ExecutorServer):
    @property
    def accepting_work(self):
        return len(self.job_workers) < args.slots and (not args.count or self.tally.taken < args.count)

    def __init__(self, client, tally):
        self.zk_client = client
        self.tally = tally
        self.hostname = args.hostname
        self.zone = args.zone
        self.log_streaming_port = 7900
        self.job_workers = {}
        self.component_info = ExecutorComponent(client, self.hostname, version=release_string)
        self.component_info.content.update(zone=args.zone, allow_unzoned=args.allow_unzoned, accepting_work=True)
        self.result_events = Results.createRegistry(client)
        self.build_worker = threading.Thread(target=self.runBuildWorker, daemon=True)
        self.build_loop_wake_event = threading.Event()
        self._running = False
        zones = [args.zone] + ([None] if args.zone and args.allow_unzoned else [])
        self.executor_api = Builds(client, zone_filter=zones, build_request_callback=self.build_loop_wake_event.set,
                                   build_event_callback=self._handleBuildEvent)

    def isComponentRunning(self):
        return True

    def executeJob(self, request, params):
        self.tally.began()
        self.job_workers[request.uuid] = FakeJob(self, request, params)
        self.job_workers[request.uuid].run()

    def _processAutohold(self, *_):
        return False

    def finishJob(self, unique):
        super().finishJob(unique)
        self.tally.ended()
        if self.tally.enough.is_set():
            self._running = False
        self.build_loop_wake_event.set()

    def abort(self):
        self._running = False
        for job in list(self.job_workers.values()):
            job.stop()
        while self.job_workers:
            time.sleep(0.01)


def main():
    global args
    top = parser(__doc__)
    top.add_argument("--hostname", default="zuul-worker")
    kinds = top.add_subparsers(dest="kind", required=True)
    for kind in ["merger", "executor"]:
        one = kinds.add_parser(kind)
        one.add_argument("--count", type=int, default=0, help="0: until SIGTERM or the timeout")
        one.add_argument("--timeout", type=float, default=60, help="seconds")
        one.add_argument("--sleep", type=float, default=0, help="seconds that a payload takes")
        one.add_argument("--bytes", type=int, default=0, help="of padding in the result")
        one.add_argument("--die-after", metavar="POINT")
        one.add_argument("--rate", action="store_true")
        if kind == "merger":
            one.add_argument("--fail", action="store_true")
        else:
            one.add_argument("--zone")
            one.add_argument("--allow-unzoned", action="store_true")
            one.add_argument("--slots", type=int, default=8)
            one.add_argument("--pause", action="store_true")
            one.add_argument("--result", default="SUCCESS")
    args = top.parse_args()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    client = connect(args)
    tally = Tally()
    worker = (Merger if args.kind == "merger" else Executor)(client, tally)
    worker.component_info.register(*([args.model_api] if args.model_api is not None else []))
    worker.component_info.state = worker.component_info.RUNNING
    say("ready", path=worker.component_info.path)
    if args.kind == "merger":
        worker._merger_running = True
        worker.merger_thread.start()
    else:
        worker._running = True
        worker.build_worker.start()
    end = time.monotonic() + args.timeout
    while not tally.enough.wait(0.02) and not stop.is_set() and time.monotonic() < end:
        pass
    worker.abort()
    if args.rate:
        tally.rate()
    finish(client, 0 if tally.enough.is_set() or stop.is_set() else 1)


if __name__ == "__main__":
    main()
