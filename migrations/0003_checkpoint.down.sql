-- Drops the stored checkpoint. The next start cannot tell whether the slot was moved meanwhile.

DROP TABLE waljet.checkpoint;
