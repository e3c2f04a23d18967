-- run_metrics: metrics of each job, the newest attempt winning from its first step on.
CREATE VIEW run_metrics AS
SELECT m.*, r.run_id, r.kind
FROM metrics AS m
JOIN job_runs AS r USING (job_id)
WHERE NOT EXISTS (
    SELECT 1
    FROM (SELECT job_id, attempt, min(step) AS first FROM metrics GROUP BY job_id, attempt) AS later
    WHERE later.job_id = m.job_id AND later.attempt > m.attempt AND later.first <= m.step
);
