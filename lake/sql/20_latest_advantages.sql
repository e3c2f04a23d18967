-- latest_advantages: for each (series_id, group_id) the rows of the newest succeeded credit job.
-- A series is one estimator with one set of parameters; several series stand side by side.
CREATE VIEW latest_advantages AS
SELECT a.*
FROM advantages AS a
JOIN (
    SELECT g.series_id, g.group_id, arg_max(g.job_id, (r.ended_at, g.job_id)) AS job_id
    FROM (SELECT DISTINCT series_id, group_id, job_id FROM advantages) AS g
    JOIN job_runs AS r USING (job_id)
    GROUP BY g.series_id, g.group_id
) AS newest USING (series_id, group_id, job_id);
