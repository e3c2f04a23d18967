-- episode_advantages, from active, members, siblings and options (scaling, by_rows, singleton_is_zero, penalty): A_E of
-- each step. baselines: statistics of the units, which are trajectories or rows.
row_scores AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        NOT coalesce(is_action_valid, true) AS is_invalid,
        member_score - CASE WHEN by_rows AND is_invalid THEN penalty ELSE 0 END AS unit_score
    FROM active
    INNER JOIN members USING (group_id, episode_id)
    CROSS JOIN options
),

baselines AS (
    SELECT group_id, group_size AS n, mean, is_dead AS is_tied, deviation
    FROM siblings, options
    WHERE NOT by_rows
    UNION ALL
    SELECT
        group_id,
        count(unit_score) AS n,
        avg(unit_score) AS mean,
        n >= 2 AND max(unit_score) - min(unit_score) <= 1e-9 * greatest(1, abs(max(unit_score))) AS is_tied,
        CASE WHEN is_tied OR n < 2 THEN 0 ELSE stddev_samp(unit_score) END AS deviation
    FROM row_scores, options
    WHERE by_rows
    GROUP BY group_id
),

episode_advantages AS (
    SELECT
        episode_id,
        step_index,
        n = 1 AND singleton_is_zero AS claims_nothing,
        CASE WHEN n = 1 THEN 1 ELSE deviation END AS spread,
        CASE
            WHEN scaling = 'mean_std_norm' THEN spread + 1e-6
            WHEN n = 1 THEN 1
            WHEN scaling = 'leave_one_out' THEN (n - 1) / n
            WHEN scaling = 'mean_ratio' THEN mean + 1e-6
            ELSE 1
        END AS divisor,
        CASE
            WHEN is_tied OR claims_nothing THEN 0
            ELSE (unit_score - CASE WHEN n = 1 THEN 0 ELSE mean END) / divisor
        END AS centred_score,
        CASE
            WHEN by_rows OR NOT is_invalid OR claims_nothing THEN 0
            WHEN scaling = 'mean_std_norm' AND penalty > 0 THEN penalty / greatest(spread, penalty)
            ELSE penalty
        END AS row_penalty,
        CASE WHEN unit_score IS NOT NULL THEN centred_score - row_penalty END AS a_episode
    FROM row_scores
    INNER JOIN baselines USING (group_id)
    CROSS JOIN options
),
