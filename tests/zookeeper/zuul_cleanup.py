#!/usr/bin/env python3
"""Runs the clean-up of Zuul's scheduler once, as its own classes do it, and prints what that did.

  zuul_cleanup.py --hosts H [--chroot C] [--age SECONDS] [merger] [executor] [events]

A request that is running or paused without a lock is lost: it is completed and reported. Params without a request and data without an
event are removed once they are --age old (Zuul: 300 seconds), results without a waiter and locks without a request at once. Without a
name, all three parts run; a part whose clean-up lock is held elsewhere is skipped. Prints a line of JSON for each lost request, and one
for each node that was created or removed."""
import configparser
import sys

from kazoo.exceptions import NoNodeError
from zuul.executor.client import ExecutorClient
from zuul.merger.client import MergeClient
from zuul.zk.cleanup import BuildRequestCleanupLock, GeneralCleanupLock, MergeRequestCleanupLock
from zuul.zk.event_queues import PIPELINE_ROOT, TENANT_ROOT, PipelineResultEventQueue, TenantManagementEventQueue
sys.dont_write_bytecode = True  # The folder is one of the sources.
from zuul_client import connect, finish, parser, say, scheduler


def tree(client, path):
    try:
        children = client.client.get_children(path)
    except NoNodeError:
        return set()
    return {path}.union(*[tree(client, f"{path}/{child}") for child in children])


def children(client, path):
    try:
        return sorted(client.client.get_children(path))
    except NoNodeError:
        return []


def under(part, lock, act):
    if not lock.acquire(blocking=False):
        say("skipped", part=part)
        return
    try:
        act()
    finally:
        lock.release()


def announced(lost):
    for request in lost:
        say("lost", path=request.path, state=request.state)
        yield request


def merger(client, age):
    merges = MergeClient(configparser.ConfigParser(), scheduler(client))
    api = merges.merger_api
    api.cache.ensureReady()
    find, api.lostRequests = api.lostRequests, lambda: announced(find())
    yield
    under("merger", MergeRequestCleanupLock(client), merges.cleanupLostMergeRequests)
    under("merger", GeneralCleanupLock(client), lambda: api.cleanup(age))


def executor(client, age):
    builds = ExecutorClient(None, scheduler(client))
    api = builds.executor_api
    for zone in api._getAllZones():
        api.zone_queues[zone].cache.ensureReady()
    find, api.lostRequests = api.lostRequests, lambda: announced(find())
    yield
    under("executor", BuildRequestCleanupLock(client), builds.cleanupLostBuildRequests)
    under("executor", GeneralCleanupLock(client), lambda: api.cleanup(age))


def events(client, age):
    queues = []
    for tenant in children(client, TENANT_ROOT):
        queues.append(TenantManagementEventQueue(client, tenant))
        for pipeline in children(client, PIPELINE_ROOT.format(tenant=tenant)):
            queues.append(PipelineResultEventQueue(client, tenant, pipeline))
    yield
    for queue in queues:
        queue.cleanup(age)


def main():
    top = parser(__doc__)
    top.add_argument("--age", type=float, default=300, help="seconds")
    top.add_argument("part", nargs="*", help="merger, executor or events")
    args = top.parse_args()
    parts = {"merger": merger, "executor": executor, "events": events}
    if set(args.part) - set(parts):
        top.error("parts are merger, executor and events")
    client = connect(args)
    # Each part pauses once its classes have created the folders that they want.
    running = [parts[part](client, args.age) for part in args.part or parts]
    for part in running:
        next(part)
    before = tree(client, "/zuul")
    for part in running:
        next(part, None)
    after = tree(client, "/zuul")
    for path in sorted(before - after):
        say("removed", path=path)
    for path in sorted(path for path in after - before if not path.startswith("/zuul/cleanup")):
        say("created", path=path)
    finish(client)


if __name__ == "__main__":
    main()
