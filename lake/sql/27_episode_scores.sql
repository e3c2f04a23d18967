-- episode_scores: what the current score says of every episode.
-- Grain: one row per episode.
-- Columns: those of `episodes`, and these:
--   score: Which score it is: `current_score`.
--   value: Of a scorer by its current version, or by the one that the score names; NULL where it is not known.
CREATE VIEW episode_scores AS
WITH chosen AS (
    SELECT
        score,
        split_part(score, '@', 1) AS scorer,
        CASE WHEN contains(score, '@') THEN substr(score, strpos(score, '@') + 1) END AS scorer_version
    FROM current_score
),

said AS (
    SELECT s.episode_id, s.value
    FROM latest_scores AS s
    JOIN scorer_versions AS v USING (scorer, scorer_version)
    JOIN chosen AS c ON v.scorer = c.scorer AND coalesce(v.scorer_version = c.scorer_version, v.is_current)
    WHERE s.step_index IS NULL AND c.score <> 'env_return'
)

SELECT
    e.episode_id,
    e.group_id,
    e.run_id,
    e.task_id,
    c.score,
    CASE WHEN c.score = 'env_return' THEN e.env_return ELSE s.value END AS value
FROM episodes AS e
CROSS JOIN chosen AS c
LEFT JOIN said AS s ON s.episode_id = e.episode_id;
