-- HGPO (arXiv 2602.22817): the SQL twin of pipelines/credit/estimators/hgpo.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), state_hash
--          (BIGINT, the anchor), reward, episode_score (DOUBLE), status (completed | truncated | aborted | failed),
--          is_active, is_action_valid (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two
--          counts as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score and one status.
-- Options  the fields of the class HGPO, under the same names: $history, $alpha, $norm, $zeros, $episode_level,
--          $baseline, $gamma, $invalid_action_penalty, $episode_source, $step_source, $default_step_reward, $truncated,
--          $revisits.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags.
WITH
options AS (
    SELECT
        $norm AS scaling,
        $norm AS step_scaling,
        true AS population,
        $baseline = 'rows' AS by_rows,
        true AS singleton_is_zero,
        $invalid_action_penalty::DOUBLE AS penalty
),

given AS (
    SELECT episode_id, group_id, step_index, state_hash, reward, episode_score, status, is_active, is_action_valid
    FROM query_table($steps)
),

-- include active

-- include returns

-- include episodes

members AS (SELECT group_id, episode_id, member_score FROM episodes),

-- include siblings

-- include episode_advantages

-- past: the keys of the last history + 1 states, this one being the last.
pasts AS (
    SELECT
        *,
        list(state_hash) OVER (
            PARTITION BY episode_id ORDER BY t ROWS BETWEEN $history PRECEDING AND CURRENT ROW
        ) AS past
    FROM returns
),

-- Level k compares steps with the same last k states; none before an episode's k-th step, or with an unknown one.
visits AS (
    SELECT
        level,
        group_id,
        past[len(past) - level + 1:] AS states,
        CASE WHEN level <= len(past) AND len(list_filter(states, lambda s : s IS NULL)) = 0 THEN states END AS key,
        episode_id,
        step_index,
        return_to_go - CASE WHEN coalesce(is_action_valid, true) THEN 0 ELSE penalty END AS step_score,
        NOT is_excluded AS is_included
    FROM pasts, options, (SELECT unnest(range(1, $history + 2)) AS level)
),

-- include anchor_groups

-- The levels that count, and their weights.
weighted AS (
    SELECT episode_id, step_index, sum(pow(level + 1, $alpha) * a) AS total, sum(pow(level + 1, $alpha)) AS weight
    FROM anchored
    WHERE is_candidate AND NOT is_single AND NOT is_revisit AND ($zeros = 'count' OR abs(a) > 1e-9)
    GROUP BY episode_id, step_index
),

credited AS (
    SELECT
        anchored.*,
        a_episode,
        CASE WHEN a IS NOT NULL THEN coalesce(total / weight, 0) END AS a_step,
        CASE WHEN $zeros = 'count' OR abs(a_episode) > 1e-9 THEN 1 ELSE 0 END AS episode_weight,
        CASE
            WHEN NOT $episode_level THEN a_step
            WHEN a IS NULL OR a_episode IS NULL THEN NULL
            ELSE coalesce(
                (coalesce(total, 0) + episode_weight * a_episode) / nullif(coalesce(weight, 0) + episode_weight, 0), 0
            )
        END AS advantage
    FROM anchored
    LEFT JOIN weighted USING (episode_id, step_index)
    INNER JOIN episode_advantages USING (episode_id, step_index)
    WHERE level = 1
)

-- include anchored_rows
