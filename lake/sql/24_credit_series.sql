-- credit_series: the estimators that computed advantages, each with its options and sources, and which one is current.
-- Grain: one row per series_id. A series is one estimator with one set of options, sources, filters and code.
-- Columns: those of `jobs`, and these:
--   estimator: Name of the estimator.
--   job_id: The newest succeeded job; one that found every group unchanged counts.
--   ended_at: When that job ended.
--   sequence: Order of that job among all jobs that ended.
--   parameters: Of that job, as JSON.
--   jobs: How many jobs of the series succeeded.
--   is_current: No other series has a newer job: it is what `trajlake credit` ran last, and what train, show and
--       the viewer take unless told otherwise.
CREATE VIEW credit_series AS
SELECT
    series_id,
    json_extract_string(parameters, '$.estimator') AS estimator,
    job_id,
    ended_at,
    sequence,
    parameters,
    jobs,
    row_number() OVER (ORDER BY ended_order(sequence, ended_at, job_id) DESC) = 1 AS is_current
FROM (
    SELECT *, count(*) OVER (PARTITION BY series_id) AS jobs
    FROM job_runs
    WHERE kind = 'credit' AND status = 'succeeded'
    QUALIFY row_number() OVER (
        PARTITION BY series_id ORDER BY ended_order(sequence, ended_at, job_id) DESC
    ) = 1
);
