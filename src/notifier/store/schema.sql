-- Format 1.
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    source TEXT NOT NULL,
    -- The source's own id: an event that is sent twice is stored once.
    source_id TEXT NOT NULL,
    type TEXT NOT NULL,
    occurred_at INTEGER NOT NULL,
    received_at INTEGER NOT NULL,
    -- JSON, as it came.
    data BLOB NOT NULL,
    UNIQUE (source, source_id)
) STRICT;

CREATE TABLE lane (
    id INTEGER PRIMARY KEY,
    endpoint TEXT NOT NULL,
    key TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'open',
    epoch INTEGER NOT NULL,
    -- The last sequence number of the epoch.
    seq INTEGER NOT NULL,
    -- The position of the first message without an outcome, and of the last message. Empty if the head is behind the tail.
    head INTEGER NOT NULL,
    tail INTEGER NOT NULL,
    -- Of the head.
    attempts INTEGER NOT NULL DEFAULT 0,
    first_attempt_at INTEGER,
    -- When the head is to be attempted. NULL if the lane is empty or stopped.
    due_at INTEGER,
    UNIQUE (endpoint, key)
) STRICT;
CREATE INDEX lane_due ON lane (endpoint, due_at) WHERE due_at IS NOT NULL;

CREATE TABLE message (
    lane INTEGER NOT NULL REFERENCES lane,
    position INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    event INTEGER NOT NULL REFERENCES event,
    outcome TEXT,
    ended_at INTEGER,
    PRIMARY KEY (lane, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE attempt (
    lane INTEGER NOT NULL,
    position INTEGER NOT NULL,
    number INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    took_ms INTEGER NOT NULL,
    -- Either one.
    status INTEGER,
    error TEXT,
    -- The head of the answer, or the error.
    detail BLOB NOT NULL,
    PRIMARY KEY (lane, position, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE endpoint (
    name TEXT PRIMARY KEY,
    -- What attempts have shown of it, as JSON.
    health TEXT NOT NULL
) STRICT, WITHOUT ROWID;
