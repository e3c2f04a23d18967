-- current_scores: what scorers say now, each under one version.
-- Grain: one row per episode or step (step_index NULL: the whole episode) and scorer. A scorer's version is the one that
-- ran last (`scorer_versions`: is_current), also if it found nothing left to score; for each episode the rows of that
-- version's newest job. Episodes that only other versions scored have none: `latest_scores` keeps every version side by
-- side. `trajlake credit --score NAME` takes these rows, `--score NAME@VERSION` those of another version.
-- Columns: those of `scores`. value is NULL where the scorer gave none; error, or else reason, says why.
CREATE VIEW current_scores AS
SELECT s.*
FROM scores AS s
JOIN (SELECT scorer, scorer_version FROM scorer_versions WHERE is_current) AS version USING (scorer, scorer_version)
JOIN (
    SELECT
        g.scorer,
        g.scorer_version,
        g.episode_id,
        arg_max(g.job_id, (coalesce(r.sequence, -1), r.ended_at, g.job_id)) AS job_id
    FROM (SELECT DISTINCT scorer, scorer_version, episode_id, job_id FROM scores) AS g
    JOIN job_runs AS r USING (job_id)
    GROUP BY g.scorer, g.scorer_version, g.episode_id
) AS newest USING (scorer, scorer_version, episode_id, job_id);
