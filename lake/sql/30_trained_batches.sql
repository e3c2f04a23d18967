-- trained_batches: what each optimizer step saw.
-- Grain: one row per training job, optimizer step and episode (or span of its steps). A resumed run repeats steps after
-- its last checkpoint under a higher attempt; the newest attempt wins from its first step on.
-- Columns: those of `batches`. Episodes that were retracted since are still told: they were trained on.
CREATE VIEW trained_batches AS
SELECT b.*
FROM batches AS b
WHERE NOT EXISTS (
    SELECT 1
    FROM (SELECT job_id, attempt, min(optimizer_step) AS first FROM batches GROUP BY job_id, attempt) AS later
    WHERE later.job_id = b.job_id AND later.attempt > b.attempt AND later.first <= b.optimizer_step
);
