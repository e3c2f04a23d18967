-- Turn-level GAE (arXiv 1506.02438): the SQL twin of pipelines/credit/estimators/gae.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score, value_estimate, final_value_estimate (DOUBLE; the last one repeated for every step of the
--          episode), status (completed | truncated | aborted | failed), is_active (BOOLEAN). NULL is unknown; NULL in
--          the last one counts as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a number that is not finite.
--          Assumed, not checked: an episode has one group, one score, one status and one final value.
-- Options  the fields of the class GAE, under the same names: $gamma, $lam, $step_source, $default_step_reward,
--          $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, a_episode;
--          anchor_size and anchor_episodes are 0.
WITH
given AS (
    SELECT
        episode_id,
        group_id,
        step_index,
        reward,
        episode_score,
        value_estimate,
        final_value_estimate,
        status,
        is_active
    FROM query_table($steps)
),

-- include active

-- include rewards

deltas AS (
    SELECT
        *,
        CASE
            WHEN NOT is_last THEN lead(value_estimate) OVER in_order
            WHEN is_truncated THEN final_value_estimate
            ELSE 0
        END AS next_value,
        r + $gamma::DOUBLE * next_value - value_estimate AS delta
    FROM rewarded
    WHERE CASE
        WHEN NOT (abs(value_estimate) <= 1e100 AND abs(final_value_estimate) <= 1e100)
            THEN error(format('steps: episode {}, step_index {}: value not finite, or beyond 1e100', episode_id, step_index))
        ELSE true
    END
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY t)
),

-- Returns and advantages are sums of one kind, with decays of their own.
terms AS (
    SELECT episode_id, t, 'return' AS kind, $gamma::DOUBLE AS decay, r AS term
    FROM deltas
    UNION ALL
    SELECT episode_id, t, 'advantage' AS kind, $gamma::DOUBLE * $lam::DOUBLE AS decay, delta AS term
    FROM deltas
),

-- include sums

returns AS (
    SELECT deltas.*, total AS return_to_go
    FROM deltas
    INNER JOIN sums ON sums.episode_id = deltas.episode_id AND sums.t = deltas.t AND sums.kind = 'return'
),

-- include return_siblings

credited AS (
    SELECT
        returns.episode_id,
        returns.step_index,
        CASE WHEN NOT is_excluded THEN total END AS a_step,
        [
            CASE
                WHEN bool_or(value_estimate IS NULL OR next_value IS NULL) OVER (
                    PARTITION BY returns.episode_id ORDER BY returns.t ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
                ) THEN 'unknown_value'
            END
        ] AS own_flags
    FROM returns
    INNER JOIN sums ON sums.episode_id = returns.episode_id AND sums.t = returns.t AND sums.kind = 'advantage'
)

-- include step_rows
