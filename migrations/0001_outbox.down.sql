-- Drops the outbox with all events in it. A publication that names it loses it, too.

DROP TABLE public.outbox;
