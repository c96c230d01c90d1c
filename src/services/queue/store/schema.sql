CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL UNIQUE,
    queue TEXT NOT NULL,
    scheduler TEXT NOT NULL,
    project TEXT NOT NULL,
    task_group TEXT NOT NULL,
    priority INTEGER NOT NULL,
    deadline INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    retries INTEGER NOT NULL,
    retries_left INTEGER NOT NULL,
    runs TEXT NOT NULL,
    -- For listings: of the definition, and the state of the last run.
    name TEXT NOT NULL,
    created INTEGER NOT NULL,
    state TEXT AS (coalesce(runs ->> '$[#-1].state', 'unscheduled')),
    -- Of the last run: set while it is pending, while it is running, and while it is unresolved.
    pending_since INTEGER,
    taken_until INTEGER,
    open_until INTEGER,
    -- The message of the last run, for the Azure dialect.
    visible INTEGER NOT NULL DEFAULT 0,
    dequeued INTEGER NOT NULL DEFAULT 0,
    receipt TEXT NOT NULL DEFAULT ''
);
CREATE INDEX pending_tasks ON tasks (queue, priority DESC, pending_since, id) WHERE pending_since IS NOT NULL;
CREATE INDEX claimed_tasks ON tasks (queue, id) WHERE taken_until IS NOT NULL;
CREATE INDEX claim_expiry ON tasks (taken_until) WHERE taken_until IS NOT NULL;
CREATE INDEX open_tasks ON tasks (open_until) WHERE open_until IS NOT NULL;
CREATE INDEX task_expiry ON tasks (expires);
CREATE INDEX task_groups ON tasks (task_group, id);
CREATE INDEX task_queues ON tasks (queue, id, created, expires);
CREATE INDEX unsuccessful_tasks ON tasks (state) WHERE state = 'failed' OR state = 'exception';
CREATE TABLE definitions (
    id INTEGER PRIMARY KEY REFERENCES tasks ON DELETE CASCADE,
    scopes TEXT NOT NULL,
    json TEXT NOT NULL
);
CREATE TABLE dependencies (
    id INTEGER NOT NULL REFERENCES tasks ON DELETE CASCADE,
    needs TEXT NOT NULL,
    PRIMARY KEY (id, needs)
) WITHOUT ROWID;
CREATE INDEX dependents ON dependencies (needs, id);
CREATE TABLE artifacts (
    task_id TEXT NOT NULL REFERENCES tasks (task_id) ON DELETE CASCADE,
    run INTEGER NOT NULL,
    name TEXT NOT NULL,
    storage TEXT NOT NULL,
    content_type TEXT NOT NULL,
    expires INTEGER NOT NULL,
    details TEXT NOT NULL,
    PRIMARY KEY (task_id, run, name)
) WITHOUT ROWID;
CREATE INDEX artifact_expiry ON artifacts (expires);
-- Events for a notifier.
CREATE TABLE outbox (id INTEGER PRIMARY KEY, event TEXT NOT NULL);
