-- anchored, from visits (level, group_id, key, episode_id, step_index, step_score, is_included) and options
-- (step_scaling, population): every step against the other steps of its group with the same key; a is A_S.
first_visits AS (
    SELECT level, group_id, key, episode_id, min(step_index) AS first_index
    FROM visits
    WHERE $revisits = 'first'
    GROUP BY level, group_id, key, episode_id
),

candidates AS (
    SELECT
        visits.*,
        is_included AND key IS NOT NULL AND step_score IS NOT NULL AS is_candidate,
        is_candidate AND step_index = coalesce(first_index, step_index) AS is_member
    FROM visits
    LEFT JOIN first_visits USING (level, group_id, key, episode_id)
),

anchor_moments AS (
    SELECT
        level,
        group_id,
        key,
        count(*)::INTEGER AS n,
        count(DISTINCT episode_id)::INTEGER AS num_episodes,
        avg(step_score) AS mean,
        n >= 2 AND max(step_score) - min(step_score) <= 1e-9 * greatest(1, abs(max(step_score))) AS is_tied,
        CASE WHEN any_value(population) THEN stddev_pop(step_score) ELSE stddev_samp(step_score) END AS deviation
    FROM candidates, options
    WHERE is_member
    GROUP BY level, group_id, key
),

anchored AS (
    SELECT
        level,
        episode_id,
        step_index,
        coalesce(n, 0) AS anchor_size,
        coalesce(num_episodes, 0) AS anchor_episodes,
        is_candidate,
        is_member AND n = 1 AS is_single,
        is_member AND is_tied AS is_constant,
        is_candidate AND NOT is_member AS is_revisit,
        CASE
            WHEN NOT is_included OR step_score IS NULL THEN NULL
            WHEN key IS NULL THEN 0
            WHEN is_revisit OR is_single OR is_constant THEN 0
            WHEN step_scaling = 'mean_std_norm' THEN (step_score - mean) / (deviation + 1e-6)
            WHEN step_scaling = 'leave_one_out' THEN (step_score - mean) * n / (n - 1)
            ELSE step_score - mean
        END AS a
    FROM candidates
    LEFT JOIN anchor_moments USING (level, group_id, key)
    CROSS JOIN options
),
