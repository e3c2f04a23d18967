-- latest_scores: the scores that count, of every version of every scorer.
-- Grain: one row per episode or step (step_index NULL: the whole episode), scorer and version. For each (scorer,
-- scorer_version, episode_id) the rows of the newest succeeded job: an episode that was scored again is scored anew as a
-- whole. Group by scorer_version too, or take `current_scores`, which has one version of each scorer.
-- Columns: those of `scores`. value is NULL where the scorer gave none; error, or else reason, says why.
CREATE VIEW latest_scores AS
SELECT s.*
FROM scores AS s
JOIN (
    SELECT
        g.scorer,
        g.scorer_version,
        g.episode_id,
        arg_max(g.job_id, ended_order(r.sequence, r.ended_at, g.job_id)) AS job_id
    FROM (SELECT DISTINCT scorer, scorer_version, episode_id, job_id FROM scores) AS g
    JOIN job_runs AS r USING (job_id)
    GROUP BY g.scorer, g.scorer_version, g.episode_id
) AS newest USING (scorer, scorer_version, episode_id, job_id);
