-- latest_scores: the scores that count, of every version of every scorer.
-- Grain: one row per episode or step (step_index NULL: the whole episode), scorer and version. For each (scorer,
-- scorer_version, episode_id) the rows of the newest succeeded job: an episode that was scored again is scored anew as a
-- whole. Group by scorer_version too, or take `current_scores`, which has one version of each scorer.
-- Columns: those of `scores`. value is NULL where the scorer gave none; error, or else reason, says why.
CREATE VIEW latest_scores AS
WITH placed AS (
    SELECT job_id, row_number() OVER (ORDER BY ended_order(sequence, ended_at, job_id)) AS place FROM job_runs
),

versions AS (
    SELECT w.scorer, w.scorer_version, count(*) > 1 AS is_of_several_jobs
    FROM (SELECT DISTINCT scorer, scorer_version, job_id FROM scores) AS w
    JOIN placed USING (job_id)
    GROUP BY w.scorer, w.scorer_version
)

-- Of a version that one job computed every row is the newest: that is cheap to tell, and usual.
SELECT s.*
FROM scores AS s
JOIN placed USING (job_id)
JOIN versions AS v USING (scorer, scorer_version)
WHERE NOT v.is_of_several_jobs
UNION ALL
SELECT s.*
FROM scores AS s
JOIN placed AS p USING (job_id)
JOIN (
    SELECT g.scorer, g.scorer_version, g.episode_id, max(p.place) AS place
    FROM scores AS g
    JOIN placed AS p USING (job_id)
    JOIN versions AS v USING (scorer, scorer_version)
    WHERE v.is_of_several_jobs
    GROUP BY g.scorer, g.scorer_version, g.episode_id
) AS newest USING (scorer, scorer_version, episode_id, place);
