-- Leads from format 1 to format 2.
-- What pages show of a long history is found by index.
ALTER TABLE attempt ADD COLUMN endpoint TEXT NOT NULL DEFAULT '';
UPDATE attempt SET endpoint = (SELECT lane.endpoint FROM lane WHERE lane.id = attempt.lane);
CREATE INDEX attempt_started ON attempt (started_at);
CREATE INDEX attempt_endpoint ON attempt (endpoint, started_at);
CREATE INDEX lane_key ON lane (key);
CREATE INDEX lane_waiting ON lane (endpoint) WHERE head <= tail;
-- Grows with each change of the endpoints that are stored.
CREATE TABLE registry (generation INTEGER NOT NULL) STRICT;
INSERT INTO registry (generation) VALUES (1);
