-- The stored checkpoint, one row for each slot. The relay writes it before it confirms a position to the server, so that a
-- slot which stands past it was moved, or dropped and created again, by somebody else. At most one write for each
-- `checkpoint.interval`, and none while nothing happens.

CREATE SCHEMA IF NOT EXISTS waljet;

CREATE TABLE IF NOT EXISTS waljet.checkpoint (
    slot            text        NOT NULL PRIMARY KEY,
    system_id       numeric(20) NOT NULL,
    timeline        bigint      NOT NULL,
    confirmed_lsn   pg_lsn      NOT NULL,
    stream          text,
    stream_created  text,
    stream_sequence numeric(20),
    snapshot        text,
    snapshot_after  pg_lsn,
    gap             text,
    updated_at      timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 10);

COMMENT ON TABLE waljet.checkpoint IS 'How far the relay of each slot has stored everything; written before the slot is moved.';
COMMENT ON COLUMN waljet.checkpoint.slot IS 'The replication slot.';
COMMENT ON COLUMN waljet.checkpoint.system_id IS 'The cluster that the position belongs to.';
COMMENT ON COLUMN waljet.checkpoint.timeline IS 'Its timeline at that time.';
COMMENT ON COLUMN waljet.checkpoint.confirmed_lsn IS 'Everything committed before it is stored in the stream.';
COMMENT ON COLUMN waljet.checkpoint.stream IS 'The JetStream stream.';
COMMENT ON COLUMN waljet.checkpoint.stream_created IS 'When the stream was created, as the broker writes it.';
COMMENT ON COLUMN waljet.checkpoint.stream_sequence IS 'A sequence that the stream had reached.';
COMMENT ON COLUMN waljet.checkpoint.snapshot IS 'What is visible in it is stored; what is not may not be.';
COMMENT ON COLUMN waljet.checkpoint.snapshot_after IS 'The commits of all that is not visible in it are past this position.';
COMMENT ON COLUMN waljet.checkpoint.gap IS 'A gap that was found and is not accepted yet.';
COMMENT ON COLUMN waljet.checkpoint.updated_at IS 'When this was written.';
