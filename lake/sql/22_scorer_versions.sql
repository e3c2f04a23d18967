-- scorer_versions: which versions of every scorer and reward there are, and which of them counts.
-- Grain: one row per scorer and version that scored anything.
-- Columns: those of `scores` and `jobs`, and these:
--   job_id: The newest succeeded job that wrote scores of the version, or that found nothing left to score and said
--       so (its parameter `confirms` is SCORER@VERSION).
--   ended_at: When that job ended.
--   sequence: Order of that job among all jobs that ended.
--   is_current: No other version of the scorer has a newer job: it is what its user ran last.
CREATE VIEW scorer_versions AS
WITH wrote AS (SELECT DISTINCT scorer, scorer_version, job_id FROM scores),

confirmed AS (
    SELECT DISTINCT w.scorer, w.scorer_version, r.job_id
    FROM wrote AS w
    JOIN job_runs AS r ON json_extract_string(r.parameters, '$.confirms') = w.scorer || '@' || w.scorer_version
    WHERE r.status = 'succeeded' AND r.kind IN ('score', 'reward')
),

newest AS (
    SELECT n.scorer, n.scorer_version, n.job_id, r.ended_at, r.sequence
    FROM (SELECT * FROM wrote UNION SELECT * FROM confirmed) AS n
    JOIN job_runs AS r USING (job_id)
    QUALIFY row_number() OVER (
        PARTITION BY n.scorer, n.scorer_version ORDER BY ended_order(r.sequence, r.ended_at, n.job_id) DESC
    ) = 1
)

SELECT
    scorer,
    scorer_version,
    job_id,
    ended_at,
    sequence,
    row_number() OVER (
        PARTITION BY scorer ORDER BY ended_order(sequence, ended_at, job_id) DESC, scorer_version DESC
    ) = 1 AS is_current
FROM newest;
