-- latest_advantages: the advantages that count in each credit series.
-- Grain: one row per step and series. For each (series_id, group_id) the rows of the newest succeeded credit job; a
-- series is one estimator with one set of options, sources and filters, and there may be many. A job that found a group
-- without episodes (credit_groups.episodes = 0: its grouping was defined anew) takes the group's earlier rows back.
-- `current_advantages` has those of one series, the one that is trained on by default.
-- Columns: those of `advantages`.
CREATE VIEW latest_advantages AS
WITH series AS (
    SELECT series_id, count(*) > 1 AS is_of_several_jobs FROM job_runs GROUP BY series_id
)

-- Of a series that one job computed every row is the newest: that is cheap to tell, and usual.
SELECT a.*
FROM advantages AS a
JOIN series AS s USING (series_id)
WHERE NOT s.is_of_several_jobs
UNION ALL
SELECT a.*
FROM advantages AS a
JOIN series AS s USING (series_id)
JOIN (
    SELECT g.series_id, g.group_id, arg_max(g.job_id, ended_order(r.sequence, r.ended_at, g.job_id)) AS job_id
    FROM (
        SELECT DISTINCT series_id, group_id, job_id FROM advantages
        UNION ALL
        SELECT series_id, group_id, job_id FROM credit_groups WHERE episodes = 0
    ) AS g
    JOIN job_runs AS r USING (job_id)
    JOIN series AS s ON s.series_id = g.series_id
    WHERE s.is_of_several_jobs
    GROUP BY g.series_id, g.group_id
) AS newest USING (series_id, group_id, job_id)
WHERE s.is_of_several_jobs;
