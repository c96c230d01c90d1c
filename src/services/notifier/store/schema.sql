-- PostgreSQL has the same tables: its types take the place of INTEGER and BLOB.
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
    -- Operators look for one by its id.
    UNIQUE (source_id, source)
) STRICT;
CREATE INDEX event_received ON event (received_at);

CREATE TABLE lane (
    id INTEGER PRIMARY KEY,
    endpoint TEXT NOT NULL,
    key TEXT NOT NULL,
    partition INTEGER NOT NULL,
    -- open, parked or paused
    state TEXT NOT NULL DEFAULT 'open',
    -- An operator's words on the state, and when a pause ends.
    note TEXT,
    paused_until INTEGER,
    epoch INTEGER NOT NULL,
    -- The last sequence number of the epoch.
    seq INTEGER NOT NULL,
    -- The epoch whose last event has come.
    closed_epoch INTEGER,
    -- The position of the first message without an outcome, and of the last message. Empty if the head is behind the tail.
    head INTEGER NOT NULL,
    tail INTEGER NOT NULL,
    -- Of the head.
    attempts INTEGER NOT NULL DEFAULT 0,
    first_attempt_at INTEGER,
    -- When the head is to be attempted. NULL if the lane is empty or stopped.
    due_at INTEGER,
    -- When the last event came.
    last_at INTEGER NOT NULL,
    UNIQUE (endpoint, key)
) STRICT;
CREATE INDEX lane_due ON lane (endpoint, due_at) WHERE due_at IS NOT NULL;
CREATE INDEX lane_stopped ON lane (state) WHERE state <> 'open';
CREATE INDEX lane_last ON lane (last_at);
CREATE INDEX lane_key ON lane (key);
CREATE INDEX lane_waiting ON lane (endpoint) WHERE head <= tail;

CREATE TABLE message (
    lane INTEGER NOT NULL REFERENCES lane,
    position INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    event INTEGER NOT NULL REFERENCES event,
    outcome TEXT,
    -- An operator's reason to skip it.
    note TEXT,
    ended_at INTEGER,
    PRIMARY KEY (lane, position)
) STRICT, WITHOUT ROWID;
CREATE INDEX message_event ON message (event);
CREATE INDEX message_ended ON message (ended_at) WHERE ended_at IS NOT NULL;

-- Messages that have ended and are sent once more, before the head of their lane.
CREATE TABLE replay (
    lane INTEGER NOT NULL REFERENCES lane,
    position INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    first_attempt_at INTEGER,
    PRIMARY KEY (lane, position)
) STRICT, WITHOUT ROWID;

CREATE TABLE attempt (
    lane INTEGER NOT NULL,
    position INTEGER NOT NULL,
    number INTEGER NOT NULL,
    endpoint TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    took_ms INTEGER NOT NULL,
    -- Either one.
    status INTEGER,
    error TEXT,
    -- The head of the answer, or the error.
    detail BLOB NOT NULL,
    PRIMARY KEY (lane, position, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX attempt_started ON attempt (started_at);
CREATE INDEX attempt_endpoint ON attempt (endpoint, started_at);

CREATE TABLE endpoint (
    name TEXT PRIMARY KEY,
    -- JSON, sealed, of an endpoint that is in no configuration.
    settings BLOB,
    -- What attempts have shown of it, as JSON.
    health TEXT,
    disabled TEXT,
    paused_until INTEGER,
    note TEXT
) STRICT, WITHOUT ROWID;

-- Grows with each change of the endpoints that are stored.
CREATE TABLE registry (generation INTEGER NOT NULL) STRICT;
INSERT INTO registry (generation) VALUES (1);

-- Live nodes, and which lanes they have.
CREATE TABLE node (
    id TEXT PRIMARY KEY,
    lease_until INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE partition (
    number INTEGER PRIMARY KEY,
    owner TEXT,
    -- Grows with each owner.
    token INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO partition (number)
    WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 63) SELECT n FROM numbers;
