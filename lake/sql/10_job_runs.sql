-- job_runs: what ran, when, on what, and how it ended.
-- Grain: one row per job, its started row and its terminal row put together. A job that failed and was resumed has two
-- terminal rows: the newest counts. `sequence` orders terminal rows whatever the clocks said.
-- Columns: those of `jobs`, and these:
--   status: started (running, or killed: there is no terminal row), succeeded, failed.
--   started_at: Time of the started row.
--   ended_at: Time of the terminal row; NULL without one.
CREATE VIEW job_runs AS
SELECT
    s.job_id,
    s.series_id,
    s.kind,
    coalesce(t.event, 'started') AS status,
    s.run_id,
    s.at AS started_at,
    t.at AS ended_at,
    t.sequence,
    t.seconds,
    t.rows_in,
    t.rows_out,
    t.rows_dropped,
    s.input_fingerprint,
    s.parameters,
    s.input_snapshot,
    t.counts,
    t.error
FROM (
    SELECT * FROM jobs WHERE event = 'started'
    QUALIFY row_number() OVER (PARTITION BY job_id ORDER BY jobs.at) = 1
) AS s
LEFT JOIN (
    SELECT * FROM jobs WHERE event <> 'started'
    QUALIFY row_number() OVER (PARTITION BY job_id ORDER BY sequence DESC NULLS LAST, jobs.at DESC, event DESC) = 1
) AS t USING (job_id);
