-- reward_hygiene: what is wrong with the rewards, before anyone trains on them.
-- Grain: one row per run, task and source of reward: env_return (episodes), env_reward (active steps), and each scorer
-- at each level, as `NAME of episodes` or `NAME of steps` (current_scores: one version of each; its rows are what it was
-- asked).
-- Columns: those of `episodes`, and these:
--   source: env_return (episodes), env_reward (active steps), or a scorer at a level, as `NAME of episodes` or
--       `NAME of steps`.
--   n: Values that there should be.
--   unscored: Those that are NULL.
--   unscored_share: Their share.
--   uncovered_episodes: Episodes that the scorer has no row for.
--   errors: Errors of the scorer.
--   not_finite: Values that are NaN or infinite: 0 in a sound lake.
--   outside_unit: Values below 0 or above 1.
--   lowest: Lowest value.
--   highest: Highest value.
--   mean: Mean value.
--   sd: Sample deviation.
--   distinct_values: Number of distinct values.
--   constant: Two or more values, all the same: no signal.
CREATE VIEW reward_hygiene AS
WITH found AS (
    SELECT run_id, task_id, 'env_return' AS source, episode_id, env_return AS value, NULL AS error FROM episodes
    UNION ALL
    SELECT e.run_id, e.task_id, 'env_reward', e.episode_id, s.reward, NULL
    FROM steps AS s
    JOIN episodes AS e ON e.episode_id = s.episode_id
    WHERE s.is_active
    UNION ALL
    SELECT
        e.run_id,
        e.task_id,
        s.scorer || CASE WHEN s.step_index IS NULL THEN ' of episodes' ELSE ' of steps' END,
        e.episode_id,
        s.value,
        s.error
    FROM current_scores AS s
    JOIN episodes AS e ON e.episode_id = s.episode_id
),

sizes AS (SELECT run_id, task_id, count(*) AS episodes FROM episodes GROUP BY run_id, task_id)

SELECT
    f.run_id,
    f.task_id,
    f.source,
    count(*) AS n,
    count(*) - count(f.value) AS unscored,
    (count(*) - count(f.value)) / count(*) AS unscored_share,
    any_value(z.episodes) - count(DISTINCT f.episode_id) AS uncovered_episodes,
    count(f.error) AS errors,
    count(*) FILTER (NOT isfinite(f.value)) AS not_finite,
    count(*) FILTER (f.value < 0 OR f.value > 1) AS outside_unit,
    min(f.value) AS lowest,
    max(f.value) AS highest,
    avg(f.value) AS mean,
    stddev_samp(f.value) AS sd,
    count(DISTINCT f.value) AS distinct_values,
    count(f.value) >= 2 AND count(DISTINCT f.value) = 1 AS constant
FROM found AS f
JOIN sizes AS z ON z.run_id = f.run_id AND z.task_id = f.task_id
GROUP BY f.run_id, f.task_id, f.source;
