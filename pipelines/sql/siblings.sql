-- Episode advantages: the SQL twin of pipelines/credit/estimators/{grpo,dr_grpo,rloo,maxrl}.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active, is_action_valid
--          (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two counts as true.
--          Stops at a wrong step number, at a status that is not in the list, at a reward or score that is not a finite
--          number, and under mean_ratio at a negative score. Assumed, not checked: an episode has one group, one score
--          and one status.
-- Options  $scaling: mean_std_norm (grpo), mean_norm (dr_grpo), leave_one_out (rloo), mean_ratio (maxrl). The fields of
--          the classes, under the same names: $episode_source, $default_step_reward, $truncated, and for grpo and
--          dr_grpo $baseline, $singleton, $invalid_action_penalty (for the others trajectories, zero and 0).
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, return_to_go,
--          a_step; anchor_size and anchor_episodes are 0.
WITH
options AS (
    SELECT
        $scaling = 'mean_std_norm' AS by_deviation,
        $scaling = 'leave_one_out' AS leave_one_out,
        $scaling = 'mean_ratio' AS by_mean,
        $baseline = 'rows' AS by_rows,
        $singleton = 'zero' AS singleton_is_zero,
        $invalid_action_penalty::DOUBLE AS penalty,
        1e-6 AS epsilon,
        1e-9 AS tie
),

-- Every step, numbered and checked; inactive ones go.
numbered AS (
    SELECT
        *,
        coalesce(is_active, true) AS is_used,
        row_number() OVER (PARTITION BY episode_id ORDER BY step_index) - 1 AS expected_index
    FROM query_table($steps)
),

active AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        coalesce(reward, $default_step_reward::DOUBLE) AS reward,
        episode_score,
        status,
        NOT coalesce(is_action_valid, true) AS invalid
    FROM numbered
    WHERE CASE
        WHEN step_index <> expected_index
            THEN error(format('steps: episode {}, step_index {}: wrong step number', episode_id, step_index))
        WHEN coalesce(status NOT IN ('completed', 'truncated', 'aborted', 'failed'), true)
            THEN error(format('steps: episode {}, step_index {}: unknown status', episode_id, step_index))
        WHEN is_used AND NOT abs(reward) <= 1e100
            THEN error(format('steps: episode {}, step_index {}: reward not finite', episode_id, step_index))
        WHEN NOT abs(episode_score) <= 1e100
            THEN error(format('steps: episode {}: episode_score not finite', episode_id))
        ELSE is_used
    END
),

-- One row per episode. score: R, NULL if unknown. member_score: the same for those that count as siblings.
episodes AS (
    SELECT
        group_id,
        episode_id,
        bool_or(status = 'truncated') AS is_truncated,
        bool_or(status IN ('aborted', 'failed')) AND count(episode_score) = 0
        OR is_truncated AND $truncated = 'exclude' AS is_excluded,
        is_truncated AND $truncated = 'mask' AS is_masked,
        CASE
            WHEN $episode_source = 'score' THEN any_value(episode_score)
            WHEN count(reward) = count(*) THEN sum(reward)
        END AS score,
        CASE
            WHEN is_excluded THEN NULL
            WHEN $scaling = 'mean_ratio' AND score < 0
                THEN error(format('steps: episode {}: a negative score has no ratio to a mean', episode_id))
            ELSE score
        END AS member_score
    FROM active
    GROUP BY group_id, episode_id
),

siblings AS (
    SELECT
        group_id,
        count(member_score)::INTEGER AS group_size,
        coalesce(
            group_size >= 2
            AND max(member_score) - min(member_score) <= any_value(tie) * greatest(1, abs(max(member_score))),
            false
        ) AS is_dead
    FROM episodes, options
    GROUP BY group_id
),

steps AS (
    SELECT
        active.group_id,
        active.episode_id,
        step_index,
        invalid,
        score,
        is_truncated,
        is_excluded,
        is_masked,
        member_score - CASE WHEN by_rows AND invalid THEN penalty ELSE 0 END AS unit_score
    FROM active
    INNER JOIN episodes USING (group_id, episode_id)
    CROSS JOIN options
),

-- What the statistics are taken over: trajectories, or rows.
units AS (
    SELECT group_id, member_score AS unit_score
    FROM episodes, options
    WHERE NOT by_rows
    UNION ALL
    SELECT group_id, unit_score
    FROM steps, options
    WHERE by_rows
),

moments AS (
    SELECT
        group_id,
        count(unit_score) AS n,
        avg(unit_score) AS mean,
        n >= 2 AND max(unit_score) - min(unit_score) <= any_value(tie) * greatest(1, abs(max(unit_score))) AS is_tied,
        CASE WHEN is_tied OR n < 2 THEN 0 ELSE stddev_samp(unit_score) END AS deviation
    FROM units, options
    GROUP BY group_id
),

advantages AS (
    SELECT
        steps.*,
        group_size,
        is_dead,
        n = 1 AND singleton_is_zero AS claims_nothing,
        CASE
            WHEN n = 1 THEN 1 + CASE WHEN by_deviation THEN epsilon ELSE 0 END
            WHEN by_deviation THEN deviation + epsilon
            WHEN by_mean THEN mean + epsilon
            WHEN leave_one_out THEN (n - 1) / n
            ELSE 1
        END AS divisor,
        CASE
            WHEN is_tied OR claims_nothing THEN 0
            ELSE (unit_score - CASE WHEN n = 1 THEN 0 ELSE mean END) / divisor
        END AS centred_score,
        CASE
            WHEN by_rows OR NOT invalid OR claims_nothing THEN 0
            WHEN by_deviation AND penalty > 0
                THEN penalty / greatest(CASE WHEN n = 1 THEN 1 ELSE deviation END, penalty)
            ELSE penalty
        END AS episode_penalty,
        CASE WHEN unit_score IS NOT NULL THEN centred_score - episode_penalty END AS a_episode
    FROM steps
    INNER JOIN siblings USING (group_id)
    INNER JOIN moments USING (group_id)
    CROSS JOIN options
)

SELECT
    episode_id,
    step_index,
    group_id,
    NULL::BIGINT AS anchor_key,
    NULL::DOUBLE AS return_to_go,
    a_episode,
    NULL::DOUBLE AS a_step,
    CASE WHEN NOT is_masked THEN a_episode END AS advantage,
    group_size,
    0::INTEGER AS anchor_size,
    0::INTEGER AS anchor_episodes,
    concat_ws(
        ',',
        CASE WHEN is_dead THEN 'dead_group' END,
        CASE WHEN is_excluded THEN 'excluded' END,
        CASE WHEN is_masked THEN 'masked' END,
        CASE WHEN group_size = 1 THEN 'singleton_group' END,
        CASE WHEN is_truncated THEN 'truncated' END,
        CASE WHEN score IS NULL THEN 'unscored' END
    ) AS flags
FROM advantages
ORDER BY group_id, episode_id, step_index
