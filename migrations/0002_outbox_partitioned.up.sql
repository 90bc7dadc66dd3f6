-- The outbox table, partitioned by time: old events go by dropping a partition, which costs nothing,
-- instead of deleting rows. Takes the place of 0001 and is not applied by default.
--
-- The publication has to be made with publish_via_partition_root = true, so that rows come under the
-- name of this table. A unique key over partitions has to hold the partition key, so that the database
-- does not find an id used twice at different times; the relay does.

CREATE TABLE public.outbox (
    id             uuid        NOT NULL DEFAULT gen_random_uuid(),
    aggregate_type text        NOT NULL CHECK (aggregate_type <> ''),
    aggregate_id   text        NOT NULL CHECK (aggregate_id <> ''),
    event_type     text        NOT NULL CHECK (event_type <> ''),
    payload        jsonb,
    headers        jsonb       NOT NULL DEFAULT '{}' CHECK (jsonb_typeof(headers) = 'object'),
    tenant_id      text,
    schema_version integer     NOT NULL DEFAULT 1 CHECK (schema_version > 0),
    created_at     timestamptz NOT NULL DEFAULT now(),
    seq            bigint      NOT NULL DEFAULT 0,
    xid            xid8        NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (id, created_at)
) PARTITION BY RANGE (created_at);

-- Partitions do not take an identity column before PostgreSQL 17, but share a sequence well.
CREATE SEQUENCE public.outbox_seq OWNED BY public.outbox.seq;
ALTER TABLE public.outbox ALTER COLUMN seq SET DEFAULT nextval('public.outbox_seq');

-- Catches rows for which no partition was made, so that no producer fails. Further ones are made ahead of
-- time: CREATE TABLE … PARTITION OF public.outbox FOR VALUES FROM ('2026-01-01') TO ('2026-02-01');
CREATE TABLE public.outbox_default PARTITION OF public.outbox DEFAULT;

COMMENT ON TABLE public.outbox IS 'Events, written with the changes that they tell of; relayed from the WAL.';
COMMENT ON COLUMN public.outbox.id IS 'The event id: the same event never has two.';
COMMENT ON COLUMN public.outbox.aggregate_type IS 'The kind of thing that the event is about, such as order.';
COMMENT ON COLUMN public.outbox.aggregate_id IS 'Which one it is about; events of one aggregate keep their order.';
COMMENT ON COLUMN public.outbox.event_type IS 'What happened, such as created.';
COMMENT ON COLUMN public.outbox.payload IS 'The content, passed on byte for byte.';
COMMENT ON COLUMN public.outbox.headers IS 'Message headers, such as traceparent: an object of strings.';
COMMENT ON COLUMN public.outbox.tenant_id IS 'Whose it is, where that matters.';
COMMENT ON COLUMN public.outbox.schema_version IS 'The version of the content''s schema.';
COMMENT ON COLUMN public.outbox.created_at IS 'When the transaction began.';
COMMENT ON COLUMN public.outbox.seq IS 'The order of insertion, which is not the order of commit.';
COMMENT ON COLUMN public.outbox.xid IS 'The transaction that wrote it.';
