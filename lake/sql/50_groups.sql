-- groups: siblings that started alike, and whether comparing them says anything.
-- Grain: one row per group as it was collected.
-- Columns: those of `episodes`, and these:
--   size: Rollouts.
--   expected_size: Rollouts that the collector meant to run.
--   complete: There are as many as that; NULL if it is not known.
--   score: Which score counts: `current_score`.
--   scored: Rollouts that have it.
--   mean_return: Mean score: of env_return the mean return.
--   sd_return: Sample deviation of the score; NULL below two.
--   lowest: Lowest score.
--   highest: Highest score.
--   dead: Two or more are scored, all the same: group-relative advantages are 0.
--   singleton: Fewer than two are scored: there is no baseline.
--   failed: Rollouts that were aborted or failed.
--   first_version: Lowest policy version that sampled.
--   last_version: Highest policy version that sampled.
--   mixed_policies: Several policies, or versions of one, sampled the group.
--   mean_steps: Mean number of steps.
CREATE VIEW groups AS
SELECT
    e.group_id,
    any_value(e.run_id) AS run_id,
    any_value(e.task_id) AS task_id,
    any_value(e.collection_round) AS collection_round,
    any_value(e.seed) AS seed,
    count(*) AS size,
    max(e.expected_group_size) AS expected_size,
    count(*) >= max(e.expected_group_size) AS complete,
    any_value(s.score) AS score,
    count(s.value) AS scored,
    avg(s.value) AS mean_return,
    stddev_samp(s.value) AS sd_return,
    min(s.value) AS lowest,
    max(s.value) AS highest,
    count(s.value) >= 2 AND coalesce(min(s.value) = max(s.value), false) AS dead,
    count(s.value) < 2 AS singleton,
    count(*) FILTER (e.status IN ('aborted', 'failed')) AS failed,
    min(e.policy_version) AS first_version,
    max(e.policy_version) AS last_version,
    coalesce(count(DISTINCT e.policy) > 1 OR min(e.policy_version) <> max(e.policy_version), false) AS mixed_policies,
    avg(e.num_steps) AS mean_steps
FROM episodes AS e
JOIN episode_scores AS s ON s.episode_id = e.episode_id
GROUP BY e.group_id;
