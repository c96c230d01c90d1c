#!/usr/bin/env python3
"""Taskcluster's own Python client against the embedded queue: an outside opinion on signatures and answers.

    pip install taskcluster==113.2.0
    tests/queue/oracle.py target/debug/journeyman     starts `journeyman queue` itself
    tests/queue/oracle.py                             uses a queue that runs

A queue that runs is named by TASKCLUSTER_ROOT_URL, TASKCLUSTER_CLIENT_ID and TASKCLUSTER_ACCESS_TOKEN; the client
must hold every scope. Exits 0 when all checks hold, and says which did not otherwise.
"""

import datetime
import os
import re
import subprocess
import sys
import tempfile
import urllib.request

import taskcluster
import taskcluster.exceptions

QUEUE = "oracle/" + "w" + taskcluster.slugId()[:8].lower().replace("_", "x").replace("-", "y")
GROUP = {"workerGroup": "oracle-group", "workerId": "oracle-1"}


def expect(what, found, wanted):
    if found != wanted:
        sys.exit(f"oracle: {what}: {wanted!r} was expected and {found!r} came")
    print(f"ok: {what}")


def refused(what, status, code, call, *args):
    try:
        call(*args)
    except (taskcluster.exceptions.TaskclusterRestFailure, taskcluster.exceptions.TaskclusterAuthFailure) as failure:
        expect(what, (failure.status_code, failure.body.get("code")), (status, code))
    else:
        sys.exit(f"oracle: {what}: it was not refused")


def definition(**more):
    now = datetime.datetime.now(datetime.timezone.utc)
    about = {"name": "oracle", "description": "d", "owner": "a@b.c", "source": "https://example.com"}
    return {
        "taskQueueId": QUEUE,
        "created": taskcluster.stringDate(now),
        "deadline": taskcluster.stringDate(now + datetime.timedelta(hours=1)),
        "payload": {"hello": "wörld", "many": list(range(50))},
        "metadata": about,
        **more,
    }


def signed_in(root, credentials):
    return taskcluster.Queue({"rootUrl": root, "credentials": credentials, "maxRetries": 0})


def todays_dialect(root, queue):
    task = taskcluster.slugId()
    made = queue.createTask(task, definition(priority="high", retries=1, scopes=["project:x"]))
    expect("createTask", made["status"]["state"], "pending")
    expect("task", queue.task(task)["payload"]["hello"], "wörld")
    expect("pendingTasks", queue.pendingTasks(QUEUE)["pendingTasks"], 1)

    claim = queue.claimWork(QUEUE, {**GROUP, "tasks": 4})["tasks"][0]
    expect("claimWork", (claim["status"]["taskId"], claim["runId"]), (task, 0))
    listed = queue.listClaimedTasks(QUEUE, query={"limit": "1"})["tasks"]
    expect("listClaimedTasks, with a signed query", listed[0]["workerId"], "oracle-1")

    worker = signed_in(root, claim["credentials"])
    again = worker.reclaimTask(task, 0)
    expect("reclaimTask with the claim's credentials", again["runId"], 0)
    worker = signed_in(root, again["credentials"])
    refused("a claim's credentials do not cancel", 403, "InsufficientScopes", worker.cancelTask, task)

    artifact(worker, queue, task)
    expect("reportCompleted", worker.reportCompleted(task, 0)["status"]["state"], "completed")
    expect("status", queue.status(task)["status"]["runs"][0]["reasonResolved"], "completed")
    refused("another outcome afterwards", 409, "RequestConflict", worker.reportFailed, task, 0)
    refused("an unknown task", 404, "ResourceNotFound", queue.status, taskcluster.slugId())
    refused("too many tasks", 400, "InputValidationError", queue.claimWork, QUEUE, {**GROUP, "tasks": 33})
    wrong = signed_in(root, {"clientId": os.environ["TASKCLUSTER_CLIENT_ID"], "accessToken": "wrong"})
    refused("a wrong token", 401, "AuthenticationFailed", wrong.status, task)


def artifact(worker, queue, task):
    expires = taskcluster.stringDate(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1))
    body = {"storageType": "s3", "contentType": "text/plain", "expires": expires}
    made = worker.createArtifact(task, 0, "public/oracle log.txt", body)
    content = b"what the oracle wrote\n" * 1000
    put = urllib.request.Request(made["putUrl"], data=content, method="PUT", headers={"Content-Type": "text/plain"})
    with urllib.request.urlopen(put, timeout=30) as answer:
        expect("the artifact's content is put", answer.status, 200)
    names = [entry["name"] for entry in queue.listArtifacts(task, 0)["artifacts"]]
    expect("listArtifacts", names, ["public/oracle log.txt"])
    signed = queue.buildSignedUrl("getArtifact", task, 0, "public/oracle log.txt")
    with urllib.request.urlopen(signed, timeout=30) as answer:
        expect("the artifact's content, through a signed URL", answer.read(), content)


def listings(queue):
    """What Taskcluster's own clients and pages call first."""
    group, tasks = taskcluster.slugId(), [taskcluster.slugId(), taskcluster.slugId()]
    for task in tasks:
        queue.createTask(task, definition(taskGroupId=group))
    expect("taskQueueCounts", queue.taskQueueCounts(QUEUE)["pendingTasks"], 2)
    listed = queue.listTaskGroup(group, query={"limit": "1"})
    again = queue.listTaskGroup(group, query={"continuationToken": listed["continuationToken"]})
    found = [entry["status"]["taskId"] for page in (listed, again) for entry in page["tasks"]]
    expect("listTaskGroup, in pages", found, tasks)
    expect("statuses", [entry["taskId"] for entry in queue.statuses({"taskIds": tasks})["statuses"]], tasks)
    expect("tasks", queue.tasks({"taskIds": tasks})["tasks"][1]["task"]["taskGroupId"], group)
    expect("listTaskQueues", [entry["taskQueueId"] for entry in queue.listTaskQueues()["taskQueues"]], [QUEUE])

    claim = queue.claimWork(QUEUE, GROUP)["tasks"][0]
    workers = queue.listWorkers(*QUEUE.split("/"))["workers"]
    expect("listWorkers", workers[0]["latestTask"], {"taskId": tasks[0], "runId": 0})
    expires = taskcluster.stringDate(datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1))
    body = {"storageType": "reference", "contentType": "text/plain", "expires": expires, "url": "http://127.0.0.1:9/x"}
    worker = signed_in(os.environ["TASKCLUSTER_ROOT_URL"], claim["credentials"])
    worker.createArtifact(tasks[0], 0, "public/x", body)
    content = {"storageType": "reference", "url": "http://127.0.0.1:9/x"}
    expect("artifact", queue.artifact(tasks[0], 0, "public/x"), content)
    expect("latestArtifact", queue.latestArtifact(tasks[0], "public/x"), content)
    expect("artifactInfo", queue.artifactInfo(tasks[0], 0, "public/x")["storageType"], "reference")
    expect("latestArtifactInfo", queue.latestArtifactInfo(tasks[0], "public/x")["name"], "public/x")
    expect("cancelTaskGroup", sorted(queue.cancelTaskGroup(group)["taskIds"]), sorted(tasks))
    expect("version", "version" in queue.version(), True)
    expect("heartbeat", (queue.heartbeat(), "alive" in queue.lbheartbeat()), ({}, True))
    refused("a method that is not there", 404, "ResourceNotFound", queue.listProvisioners)


def retries(root, queue):
    task = taskcluster.slugId()
    queue.createTask(task, definition(retries=1))
    claim = queue.claimWork(QUEUE, GROUP)["tasks"][0]
    worker = signed_in(root, claim["credentials"])
    status = worker.reportException(task, 0, {"reason": "worker-shutdown"})["status"]
    expect("a shutdown is retried", [run["state"] for run in status["runs"]], ["exception", "pending"])
    refused("a reclaim afterwards", 409, "RequestConflict", worker.reclaimTask, task, 0)
    expect("cancelTask", queue.cancelTask(task)["status"]["runs"][1]["reasonResolved"], "canceled")
    expect("rerunTask", queue.rerunTask(task)["status"]["runs"][2]["reasonCreated"], "rerun")
    queue.cancelTask(task)


def temporary(root, credentials):
    narrow = taskcluster.createTemporaryCredentials(
        credentials["clientId"],
        credentials["accessToken"],
        datetime.datetime.now(datetime.timezone.utc),
        datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=1),
        [f"queue:pending-count:{QUEUE}"],
        name="oracle/temporary",
    )
    queue = signed_in(root, narrow)
    expect("temporary credentials of a client", queue.pendingTasks(QUEUE)["taskQueueId"], QUEUE)
    refused("and their bounds", 403, "InsufficientScopes", queue.status, taskcluster.slugId())


def main():
    root = os.environ["TASKCLUSTER_ROOT_URL"]
    credentials = {
        "clientId": os.environ["TASKCLUSTER_CLIENT_ID"],
        "accessToken": os.environ["TASKCLUSTER_ACCESS_TOKEN"],
    }
    queue = signed_in(root, credentials)
    expect("ping", queue.ping()["alive"], True)
    todays_dialect(root, queue)
    listings(queue)
    retries(root, queue)
    temporary(root, credentials)


def with_own_queue(binary):
    """Starts the queue with one client that may do everything, and waits for the line that says where it listens."""
    with tempfile.TemporaryDirectory() as folder:
        config, token = os.path.join(folder, "journeyman.toml"), os.path.join(folder, "token")
        with open(os.open(token, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as out:
            out.write("of-the-oracle")
        with open(config, "w", encoding="utf-8") as out:
            out.write(f'[queue]\ndb = "{folder}/queue.db"\nlisten = "127.0.0.1:0"\n\n')
            out.write(f'[queue.clients.oracle]\naccess_token_file = "{token}"\n')
        command = [binary, "queue", "--config", config]
        started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            found = (re.search(r"http://[0-9.:]+", line) for line in started.stdout)
            root = next((match.group() for match in found if match), None)
            if root is None:
                sys.exit(f"oracle: {binary} queue ended without saying where it listens")
            os.environ["TASKCLUSTER_ROOT_URL"] = root
            os.environ["TASKCLUSTER_CLIENT_ID"] = "oracle"
            os.environ["TASKCLUSTER_ACCESS_TOKEN"] = "of-the-oracle"
            main()
        finally:
            started.terminate()
            started.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with_own_queue(sys.argv[1])
    else:
        main()
    print("oracle: everything holds")
