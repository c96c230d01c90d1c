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
    open INTEGER NOT NULL
);
CREATE INDEX open_tasks ON tasks (id) WHERE open = 1;
CREATE INDEX task_expiry ON tasks (expires);
CREATE TABLE definitions (id INTEGER PRIMARY KEY, scopes TEXT NOT NULL, json TEXT NOT NULL);
CREATE TABLE dependencies (
    needs TEXT NOT NULL,
    id INTEGER NOT NULL,
    PRIMARY KEY (needs, id)
) WITHOUT ROWID;
CREATE TABLE message_queues (queue TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE messages (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    queue TEXT NOT NULL,
    priority INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    run INTEGER NOT NULL,
    inserted INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    visible INTEGER NOT NULL,
    dequeued INTEGER NOT NULL,
    receipt TEXT NOT NULL,
    UNIQUE (task_id, run)
);
CREATE INDEX lanes ON messages (queue, priority, visible, id);
CREATE TABLE artifacts (
    task_id TEXT NOT NULL,
    run INTEGER NOT NULL,
    name TEXT NOT NULL,
    storage TEXT NOT NULL,
    content_type TEXT NOT NULL,
    expires INTEGER NOT NULL,
    details TEXT NOT NULL,
    PRIMARY KEY (task_id, run, name)
) WITHOUT ROWID;
CREATE INDEX artifact_expiry ON artifacts (expires);
