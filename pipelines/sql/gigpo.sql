-- GiGPO advantages (arXiv 2505.10978) over stored steps: the SQL twin of pipelines/credit/estimators/gigpo.py.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), state_hash
--          (BIGINT, the anchor), reward, episode_score (DOUBLE), status (completed | truncated | aborted | failed),
--          is_active, is_action_valid (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two
--          counts as true.
--          Stops at a wrong step number, at a status that is not in the list, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score and one status.
-- Options  the fields of the class GiGPO, under the same names: $gamma, $omega, $combination, $episode_norm,
--          $step_norm, $baseline, $singleton, $invalid_action_penalty, $episode_source, $step_source,
--          $default_step_reward, $truncated, $revisits.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags.
--
-- Returns  A power-scaled suffix sum underflows in long episodes. So an episode is cut into blocks short enough for
--          gamma^length to stay above e^-230. Inside a block the scaled sum is exact; beyond it a step sees the sum of
--          the next block, discounted; what is left out is discounted by more than e^-230, which float64 cannot show.
WITH
options AS (
    SELECT
        $gamma::DOUBLE AS gamma,
        CASE
            WHEN $gamma::DOUBLE = 1 THEN 1e15
            WHEN $gamma::DOUBLE = 0 THEN 1
            ELSE greatest(1, floor(230 / -ln($gamma::DOUBLE)))
        END::BIGINT AS block,
        CASE $combination WHEN 'sum' THEN 1 ELSE $omega::DOUBLE END AS episode_weight,
        CASE $combination WHEN 'sum' THEN $omega::DOUBLE ELSE 1 - $omega::DOUBLE END AS step_weight,
        $episode_norm = 'mean_std_norm' AS scale_episodes,
        $step_norm = 'mean_std_norm' AS scale_steps,
        $baseline = 'rows' AS by_rows,
        $singleton = 'zero' AS singleton_is_zero,
        $invalid_action_penalty::DOUBLE AS penalty,
        1e-6 AS epsilon,
        1e-9 AS tie
),

-- Every step, numbered and checked; inactive ones go. t: number among the active steps of the episode.
numbered AS (
    SELECT
        *,
        coalesce(is_active, true) AS is_used,
        row_number() OVER in_order - 1 AS expected_index,
        count(*) FILTER (WHERE is_used) OVER in_order - 1 AS t,
        count(*) FILTER (WHERE is_used) OVER (in_order ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS num_later
    FROM query_table($steps)
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY step_index)
),

active AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        state_hash AS anchor_key,
        coalesce(reward, $default_step_reward::DOUBLE) AS reward,
        episode_score,
        status,
        NOT coalesce(is_action_valid, true) AS invalid,
        t,
        CASE WHEN num_later = 0 THEN episode_score ELSE 0 END AS terminal_score,
        CASE $step_source
            WHEN 'rewards' THEN coalesce(reward, $default_step_reward::DOUBLE)
            WHEN 'terminal_score' THEN terminal_score
            ELSE coalesce(reward, $default_step_reward::DOUBLE) + terminal_score
        END AS r
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
        CASE WHEN NOT is_excluded THEN score END AS member_score
    FROM active
    GROUP BY ALL
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

-- Return-to-go. place: where the step lies in its block.
blocks AS (
    SELECT
        active.*,
        block,
        gamma,
        t % block AS place,
        sum(coalesce(r, 0) * pow(gamma, t % block)) OVER (
            in_order ROWS BETWEEN CURRENT ROW AND block - 1 - t % block FOLLOWING
        ) AS scaled_sum,
        bool_or(r IS NULL) OVER (in_order ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS is_unknown
    FROM active, options
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY t)
),

returns AS (
    SELECT
        *,
        CASE
            WHEN NOT is_unknown
                THEN scaled_sum / pow(gamma, place) + pow(gamma, block - place)
                    * coalesce(lead(scaled_sum, block - place) OVER (PARTITION BY episode_id ORDER BY t), 0)
        END AS return_to_go
    FROM blocks
),

-- Empty unless asked for.
first_visits AS (
    SELECT group_id, anchor_key, episode_id, min(step_index) AS first_index
    FROM active
    WHERE $revisits = 'first'
    GROUP BY ALL
),

-- One row per step with everything that is known before siblings are compared.
steps AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        anchor_key,
        invalid,
        return_to_go,
        score,
        is_truncated,
        is_excluded,
        is_masked,
        member_score - CASE WHEN by_rows AND invalid THEN penalty ELSE 0 END AS unit_score,
        return_to_go - CASE WHEN invalid THEN penalty ELSE 0 END AS step_score,
        NOT is_excluded AND anchor_key IS NOT NULL AND return_to_go IS NOT NULL AS is_candidate,
        is_candidate AND step_index = coalesce(first_index, step_index) AS is_member
    FROM returns
    INNER JOIN episodes USING (group_id, episode_id)
    LEFT JOIN first_visits USING (group_id, anchor_key, episode_id)
    CROSS JOIN options
),

-- What the episode mean is taken over: trajectories, or rows.
units AS (
    SELECT group_id, member_score AS unit_score
    FROM episodes, options
    WHERE NOT by_rows
    UNION ALL
    SELECT group_id, unit_score
    FROM steps, options
    WHERE by_rows
),

group_moments AS (
    SELECT
        group_id,
        count(unit_score) AS n,
        avg(unit_score) AS mean,
        n >= 2 AND max(unit_score) - min(unit_score) <= any_value(tie) * greatest(1, abs(max(unit_score))) AS is_tied,
        CASE WHEN is_tied OR n < 2 THEN 0 ELSE stddev_samp(unit_score) END AS deviation
    FROM units, options
    GROUP BY group_id
),

anchor_moments AS (
    SELECT
        group_id,
        anchor_key,
        count(*)::INTEGER AS n,
        count(DISTINCT episode_id)::INTEGER AS num_episodes,
        avg(step_score) AS mean,
        n >= 2 AND max(step_score) - min(step_score) <= any_value(tie) * greatest(1, abs(max(step_score))) AS is_tied,
        CASE WHEN n < 2 THEN 0 ELSE stddev_samp(step_score) END AS deviation
    FROM steps, options
    WHERE is_member
    GROUP BY group_id, anchor_key
),

advantages AS (
    SELECT
        steps.*,
        group_size,
        is_dead,
        coalesce(a.n, 0) AS anchor_size,
        coalesce(a.num_episodes, 0) AS anchor_episodes,
        is_member AND a.n = 1 AS is_single,
        is_member AND a.is_tied AS is_constant,
        is_candidate AND NOT is_member AS is_revisit,
        g.n = 1 AND singleton_is_zero AS claims_nothing,
        CASE
            WHEN g.is_tied OR claims_nothing THEN 0
            ELSE (unit_score - CASE WHEN g.n = 1 THEN 0 ELSE g.mean END)
                / CASE WHEN scale_episodes THEN CASE WHEN g.n = 1 THEN 1 ELSE g.deviation END + epsilon ELSE 1 END
        END AS centred_score,
        CASE
            WHEN by_rows OR NOT invalid OR claims_nothing THEN 0
            WHEN scale_episodes AND penalty > 0
                THEN penalty / greatest(CASE WHEN g.n = 1 THEN 1 ELSE g.deviation END, penalty)
            ELSE penalty
        END AS episode_penalty,
        CASE WHEN member_score_known THEN centred_score - episode_penalty END AS a_episode,
        CASE
            WHEN NOT is_candidate THEN NULL
            WHEN is_revisit OR is_single OR is_constant THEN 0
            ELSE (step_score - a.mean) / CASE WHEN scale_steps THEN a.deviation + epsilon ELSE 1 END
        END AS a_step
    FROM (SELECT *, unit_score IS NOT NULL AS member_score_known FROM steps) AS steps
    INNER JOIN siblings USING (group_id)
    INNER JOIN group_moments AS g USING (group_id)
    LEFT JOIN anchor_moments AS a USING (group_id, anchor_key)
    CROSS JOIN options
)

SELECT
    episode_id,
    step_index,
    group_id,
    anchor_key,
    return_to_go,
    a_episode,
    a_step,
    CASE
        WHEN NOT is_masked
            THEN CASE WHEN episode_weight = 0 THEN 0 ELSE episode_weight * a_episode END
                + CASE WHEN step_weight = 0 THEN 0 ELSE step_weight * a_step END
    END AS advantage,
    group_size,
    anchor_size,
    anchor_episodes,
    concat_ws(
        ',',
        CASE WHEN is_constant THEN 'constant_anchor' END,
        CASE WHEN is_dead THEN 'dead_group' END,
        CASE WHEN is_excluded THEN 'excluded' END,
        CASE WHEN is_masked THEN 'masked' END,
        CASE WHEN is_revisit THEN 'revisit' END,
        CASE WHEN is_single THEN 'singleton_anchor' END,
        CASE WHEN group_size = 1 THEN 'singleton_group' END,
        CASE WHEN is_truncated THEN 'truncated' END,
        CASE WHEN return_to_go IS NULL THEN 'unknown_return' END,
        CASE WHEN anchor_key IS NULL THEN 'unknown_state' END,
        CASE WHEN score IS NULL THEN 'unscored' END
    ) AS flags
FROM advantages, options
ORDER BY group_id, episode_id, step_index
