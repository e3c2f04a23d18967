-- ended_order(sequence, ended_at, job_id): what orders jobs by when they ended, whatever the clocks said.
-- The one rule of "newest", for ORDER BY and arg_max over rows of job_runs: by the table version that the terminal row
-- was appended to (jobs without one come first), then by time, then by id.
CREATE MACRO ended_order(sequence, ended_at, job_id) AS (coalesce(sequence, -1), ended_at, job_id);
