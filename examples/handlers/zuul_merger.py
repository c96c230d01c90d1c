#!/usr/bin/env python3
"""Runs the merge jobs of a Zuul with Zuul's own Merger class: a handler for `dialect = "zuul-merger"`.

    [handler.merge]
    kind = "program"
    exec = ["/opt/zuul/bin/python3", "examples/handlers/zuul_merger.py", "/etc/zuul/zuul.conf"]

It reads the connections and the section `merger` of a zuul.conf, and needs Python with Zuul's package. One job at a time uses
`git_dir`; with more slots the others wait for it.
"""

import fcntl
import json
import logging
import os
import sys
from configparser import ConfigParser
from types import SimpleNamespace

from zuul.lib.config import get_default
from zuul.lib.connections import ConnectionRegistry
from zuul.merger.merger import Merger
from zuul.merger.server import BaseMergeServer, BaseRepoLocks


class Merges(BaseMergeServer):
    """The merge jobs of Zuul's server, without its queue."""

    def __init__(self, config):
        self.connections = ConnectionRegistry()
        self.connections.configure(config, sources=True)
        self.repo_locks = BaseRepoLocks()

        def setting(key, default):
            return get_default(config, "merger", key, default)

        root = setting("git_dir", "/var/lib/zuul/merger-git")
        os.makedirs(root, exist_ok=True)
        self.lock = open(f"{root}.lock", "w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.merger = Merger(
            root, self.connections, None, setting("git_user_email", "zuul.merger.default@example.com"),
            setting("git_user_name", "Zuul Merger Default"), setting("git_http_low_speed_limit", "1000"),
            setting("git_http_low_speed_time", "30"), git_timeout=int(setting("git_timeout", 300)))


logging.basicConfig(level=logging.INFO, stream=sys.stdout)
document = json.load(sys.stdin)
conf = ConfigParser()
with open(sys.argv[1]) as file:
    conf.read_file(file)
job = document["task"]
request = SimpleNamespace(uuid=document["taskId"], job_type=job["job_type"], event_id=job.get("event_id"))
result = Merges(conf).executeMergeJob(request, document["payload"])
with os.fdopen(3, "w") as to_worker:
    print(json.dumps({"type": "result", "value": result}), file=to_worker)
