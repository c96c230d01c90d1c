#!/usr/bin/env python3
"""Workers as processes of this host, for a pool with `driver = "exec"`:

    [pool.core]
    driver = "exec"
    exec = ["/opt/drivers/processes.py", "/var/lib/workers", "/opt/worker"]

The first argument is a folder for its notes, the rest is what is started. It reads its request from standard input; a
failure is told by the exit status and the last line of standard error. A real one asks a scheduler instead of the kernel.
"""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def start_time(pid):
    """The start time of a process, in clock ticks: with the pid it names one process. None if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]


def supervise(command, variables, note, log):
    """Starts a worker, and notes its pid and, when it has exited, its exit status."""
    worker = subprocess.Popen(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    note["pid"], note["started"] = worker.pid, start_time(worker.pid)
    write(note)
    os.close(told)
    end = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    note["exit"] = f"exit status: {end.si_status}" if end.si_code == os.CLD_EXITED else f"signal: {end.si_status}"
    # Before the process is reaped: a list that finds no process must not remove a note that is yet to be written.
    write(note)
    worker.wait()


def path(id, kind):
    if not id or "/" in id:
        sys.exit(f"{id!r} is no name of a worker")
    return folder / f"{id}.{kind}"


def write(note):
    fresh = path(note["id"], "new")
    fresh.write_text(json.dumps(note))
    fresh.rename(path(note["id"], "json"))


def show(note):
    """Says who is there. All pools share the folder here: each line says whose its worker is."""
    log = path(note["id"], "log")
    seen = {name: note[name] for name in ("pool", "id", "key")}
    if "exit" not in note and start_time(note["pid"]) != note["started"]:
        note["exit"] = "it is gone, and nobody has seen how"
    if "exit" in note:
        seen |= {"exit": note["exit"], "log": str(log), "log_tail": log.read_text(errors="replace")[-2000:]}
    print(json.dumps(seen))


folder, command, request = Path(sys.argv[1]), sys.argv[2:], json.loads(sys.stdin.readline())
folder.mkdir(parents=True, exist_ok=True)
if request["action"] == "list":
    for name in folder.glob("*.json"):
        try:
            text = name.read_text()
        except FileNotFoundError:
            continue  # forgotten meanwhile
        show(json.loads(text))
elif request["action"] == "start":
    note = {name: request[name] for name in ("pool", "id", "key")}
    log = os.open(path(request["id"], "log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    heard, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(heard)
        for descriptor in (0, 1, 2):
            os.dup2(log, descriptor)
        supervise(command, request["variables"], note, log)
        os._exit(0)
    os.close(told)
    # The end of it says that the worker was started, or that it could not be: then it has no note.
    os.read(heard, 1)
    if not path(request["id"], "json").exists():
        sys.exit(f"it cannot be started: {path(request['id'], 'log').read_text()[-200:].strip()}")
elif request["action"] == "stop" and path(request["id"], "json").exists():
    note = json.loads(path(request["id"], "json").read_text())
    if request["mode"] == "remove":
        path(request["id"], "json").unlink(missing_ok=True)
    elif start_time(note["pid"]) == note["started"]:
        os.kill(note["pid"], signal.SIGKILL if request["mode"] == "kill" else signal.SIGTERM)
