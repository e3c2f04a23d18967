-- groups: siblings that started alike, and whether comparing them says anything.
-- Grain: one row per group as it was collected.
-- Columns: size (rollouts), expected_size (what the collector meant to run), complete (as many; NULL if not known),
-- scored (rollouts with an env_return), mean_return, sd_return (sample deviation, NULL below two), lowest, highest,
-- dead (two or more scored, all the same: group-relative advantages are 0), singleton (fewer than two scored: no
-- baseline), failed (aborted or failed), first_version and last_version of the policy, mixed_policies, mean_steps.
CREATE VIEW groups AS
SELECT
    group_id,
    any_value(run_id) AS run_id,
    any_value(task_id) AS task_id,
    any_value(collection_round) AS collection_round,
    any_value(seed) AS seed,
    count(*) AS size,
    max(expected_group_size) AS expected_size,
    count(*) >= max(expected_group_size) AS complete,
    count(env_return) AS scored,
    avg(env_return) AS mean_return,
    stddev_samp(env_return) AS sd_return,
    min(env_return) AS lowest,
    max(env_return) AS highest,
    count(env_return) >= 2 AND coalesce(min(env_return) = max(env_return), false) AS dead,
    count(env_return) < 2 AS singleton,
    count(*) FILTER (status IN ('aborted', 'failed')) AS failed,
    min(policy_version) AS first_version,
    max(policy_version) AS last_version,
    coalesce(count(DISTINCT policy) > 1 OR min(policy_version) <> max(policy_version), false) AS mixed_policies,
    avg(num_steps) AS mean_steps
FROM episodes
GROUP BY group_id;
