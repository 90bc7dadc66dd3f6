-- The outbox table. A row is an event: it is written in the transaction that it tells of, and never
-- changed. The relay reads it from the WAL and leaves no mark in it, so that rows may be deleted at any
-- time, even in the same transaction.
--
-- The constraints let a producer's mistake fail in the producer's own transaction, not in the relay.

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
    seq            bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    xid            xid8        NOT NULL DEFAULT pg_current_xact_id(),
    PRIMARY KEY (id)
);

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
