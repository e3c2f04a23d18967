-- From active and options (scaling).
-- episodes. score: R, NULL if unknown. member_score: the same for those that count as siblings.
episodes AS (
    SELECT
        group_id,
        episode_id,
        CASE
            WHEN $episode_source = 'score' THEN any_value(episode_score)
            WHEN count(reward) = count(*) THEN sum(reward)
        END AS score,
        CASE
            WHEN is_excluded THEN NULL
            WHEN scaling = 'mean_ratio' AND score < 0
                THEN error(format('steps: episode {}: a negative score has no ratio to a mean', episode_id))
            ELSE score
        END AS member_score
    FROM active, options
    GROUP BY group_id, episode_id, is_excluded, scaling
),

-- siblings: what the siblings of each group have in common.
siblings AS (
    SELECT
        group_id,
        count(member_score)::INTEGER AS group_size,
        avg(member_score) AS mean,
        coalesce(
            group_size >= 2
            AND max(member_score) - min(member_score) <= 1e-9 * greatest(1, abs(max(member_score))),
            false
        ) AS is_dead,
        CASE WHEN is_dead OR group_size < 2 THEN 0 ELSE stddev_samp(member_score) END AS deviation
    FROM episodes
    GROUP BY group_id
),

row_scores AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        NOT coalesce(is_action_valid, true) AS is_invalid,
        $invalid_action_penalty::DOUBLE AS penalty,
        member_score - CASE WHEN $baseline = 'rows' AND is_invalid THEN penalty ELSE 0 END AS unit_score
    FROM active
    INNER JOIN episodes USING (group_id, episode_id)
),

-- baselines: statistics of the units, which are trajectories or rows.
baselines AS (
    SELECT group_id, group_size AS n, mean, is_dead AS is_tied, deviation
    FROM siblings
    WHERE $baseline <> 'rows'
    UNION ALL
    SELECT
        group_id,
        count(unit_score) AS n,
        avg(unit_score) AS mean,
        n >= 2 AND max(unit_score) - min(unit_score) <= 1e-9 * greatest(1, abs(max(unit_score))) AS is_tied,
        CASE WHEN is_tied OR n < 2 THEN 0 ELSE stddev_samp(unit_score) END AS deviation
    FROM row_scores
    WHERE $baseline = 'rows'
    GROUP BY group_id
),

-- episode_advantages: A_E of each step.
episode_advantages AS (
    SELECT
        episode_id,
        step_index,
        n = 1 AND $singleton = 'zero' AS claims_nothing,
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
            WHEN $baseline = 'rows' OR NOT is_invalid OR claims_nothing THEN 0
            WHEN scaling = 'mean_std_norm' AND penalty > 0 THEN penalty / greatest(spread, penalty)
            ELSE penalty
        END AS row_penalty,
        CASE WHEN unit_score IS NOT NULL THEN centred_score - row_penalty END AS a_episode
    FROM row_scores
    INNER JOIN baselines USING (group_id)
    CROSS JOIN options
),
