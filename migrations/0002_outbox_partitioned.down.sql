-- Drops the outbox with all its partitions and all events in them.

DROP TABLE public.outbox;
