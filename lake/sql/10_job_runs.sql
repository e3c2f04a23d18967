-- job_runs: one row per job, its started row and its terminal row put together.
-- status is 'started' while there is no terminal row: the job is running, or was killed.
CREATE VIEW job_runs AS
SELECT
    s.job_id,
    s.series_id,
    s.kind,
    coalesce(t.event, 'started') AS status,
    s.run_id,
    s.at AS started_at,
    t.at AS ended_at,
    t.seconds,
    t.rows_in,
    t.rows_out,
    t.rows_dropped,
    s.input_fingerprint,
    s.parameters,
    s.input_snapshot,
    t.counts,
    t.error
FROM (SELECT * FROM jobs WHERE event = 'started') AS s
LEFT JOIN (SELECT * FROM jobs WHERE event <> 'started') AS t USING (job_id);
