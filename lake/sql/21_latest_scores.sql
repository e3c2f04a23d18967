-- latest_scores: the scores that count, of every version of every scorer.
-- Grain: one row per episode or step (step_index NULL: the whole episode), scorer and series. For each (series_id,
-- scorer, episode_id) the rows of the newest succeeded job: an episode that was scored again is scored anew as a whole.
-- Another version of a scorer is another series: group by scorer_version too, or take `current_scores`.
-- Columns: those of `scores`. value is NULL where the scorer gave none; error, or else reason, says why.
CREATE VIEW latest_scores AS
SELECT s.*
FROM scores AS s
JOIN (
    SELECT g.series_id, g.scorer, g.episode_id, arg_max(g.job_id, (coalesce(r.sequence, -1), r.ended_at, g.job_id)) AS job_id
    FROM (SELECT DISTINCT series_id, scorer, episode_id, job_id FROM scores) AS g
    JOIN job_runs AS r USING (job_id)
    GROUP BY g.series_id, g.scorer, g.episode_id
) AS newest USING (series_id, scorer, episode_id, job_id);
