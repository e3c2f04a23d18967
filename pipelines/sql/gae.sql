-- Turn-level GAE (arXiv 1506.02438): the SQL twin of pipelines/credit/estimators/gae.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score, value_estimate, final_value_estimate (DOUBLE; the last one repeated for every step of the
--          episode), status (completed | truncated | aborted | failed), is_active (BOOLEAN). NULL is unknown; NULL in
--          the last one counts as true.
--          Stops at a wrong step number, at a status that is not in the list, and at a number that is not finite.
--          Assumed, not checked: an episode has one group, one score, one status and one final value.
-- Options  the fields of the class GAE, under the same names: $gamma, $lam, $step_source, $default_step_reward,
--          $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, a_episode;
--          anchor_size and anchor_episodes are 0.
--
-- Sums     A power-scaled suffix sum underflows in long episodes. So an episode is cut into blocks short enough for
--          decay^length to stay above e^-230. Inside a block the scaled sum is exact; beyond it a step sees the sum of
--          the next block, discounted; what is left out is discounted by more than e^-230, which float64 cannot show.
--          Returns (decay gamma) and advantages (decay gamma * lam) are two such sums over the same rows.
WITH
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
        t,
        value_estimate,
        status = 'truncated' AS is_truncated,
        status IN ('aborted', 'failed') AND episode_score IS NULL
        OR is_truncated AND $truncated = 'exclude' AS is_excluded,
        is_truncated AND $truncated = 'mask' AS is_masked,
        CASE WHEN num_later = 0 THEN episode_score ELSE 0 END AS terminal_score,
        CASE $step_source
            WHEN 'rewards' THEN coalesce(reward, $default_step_reward::DOUBLE)
            WHEN 'terminal_score' THEN terminal_score
            ELSE coalesce(reward, $default_step_reward::DOUBLE) + terminal_score
        END AS r,
        num_later = 0 AS is_last,
        CASE WHEN is_truncated THEN final_value_estimate ELSE 0 END AS last_value
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
        WHEN is_used AND NOT (abs(value_estimate) <= 1e100 AND abs(final_value_estimate) <= 1e100)
            THEN error(format('steps: episode {}, step_index {}: value not finite', episode_id, step_index))
        ELSE is_used
    END
),

deltas AS (
    SELECT
        *,
        CASE WHEN is_last THEN last_value ELSE lead(value_estimate) OVER in_order END AS next_value,
        r + $gamma::DOUBLE * next_value - value_estimate AS delta
    FROM active
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY t)
),

-- Both sums, as rows of one table: kind, decay, term.
terms AS (
    SELECT episode_id, t, 'return' AS kind, $gamma::DOUBLE AS decay, r AS term
    FROM deltas
    UNION ALL
    SELECT episode_id, t, 'advantage' AS kind, $gamma::DOUBLE * $lam::DOUBLE AS decay, delta AS term
    FROM deltas
),

-- place: where the step lies in its block.
blocks AS (
    SELECT
        *,
        CASE WHEN decay = 1 THEN 1e15 WHEN decay = 0 THEN 1 ELSE greatest(1, floor(230 / -ln(decay))) END::BIGINT AS block,
        t % block AS place,
        sum(coalesce(term, 0) * pow(decay, place)) OVER (
            in_order ROWS BETWEEN CURRENT ROW AND block - 1 - place FOLLOWING
        ) AS scaled_sum,
        bool_or(term IS NULL) OVER (in_order ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS is_unknown
    FROM terms
    WINDOW in_order AS (PARTITION BY episode_id, kind ORDER BY t)
),

sums AS (
    SELECT
        episode_id,
        t,
        kind,
        CASE
            WHEN NOT is_unknown
                THEN scaled_sum / pow(decay, place) + pow(decay, block - place)
                    * coalesce(lead(scaled_sum, block - place) OVER (PARTITION BY episode_id, kind ORDER BY t), 0)
        END AS total
    FROM blocks
),

steps AS (
    SELECT
        deltas.*,
        g.total AS return_to_go,
        CASE WHEN NOT is_excluded THEN a.total END AS a_step,
        bool_or(value_estimate IS NULL OR next_value IS NULL) OVER (
            PARTITION BY deltas.episode_id ORDER BY deltas.t ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
        ) AS is_unknown_value
    FROM deltas
    INNER JOIN sums AS g ON g.episode_id = deltas.episode_id AND g.t = deltas.t AND g.kind = 'return'
    INNER JOIN sums AS a ON a.episode_id = deltas.episode_id AND a.t = deltas.t AND a.kind = 'advantage'
),

-- Trajectories that take part and whose whole return is known.
siblings AS (
    SELECT group_id, count(*) FILTER (WHERE t = 0 AND NOT is_excluded AND return_to_go IS NOT NULL)::INTEGER AS group_size
    FROM steps
    GROUP BY group_id
)

SELECT
    episode_id,
    step_index,
    group_id,
    NULL::BIGINT AS anchor_key,
    return_to_go,
    NULL::DOUBLE AS a_episode,
    a_step,
    CASE WHEN NOT is_masked THEN a_step END AS advantage,
    group_size,
    0::INTEGER AS anchor_size,
    0::INTEGER AS anchor_episodes,
    concat_ws(
        ',',
        CASE WHEN is_excluded THEN 'excluded' END,
        CASE WHEN is_masked THEN 'masked' END,
        CASE WHEN is_truncated THEN 'truncated' END,
        CASE WHEN return_to_go IS NULL THEN 'unknown_return' END,
        CASE WHEN is_unknown_value THEN 'unknown_value' END
    ) AS flags
FROM steps
INNER JOIN siblings USING (group_id)
ORDER BY group_id, episode_id, step_index
