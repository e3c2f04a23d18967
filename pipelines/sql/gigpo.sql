-- GiGPO advantages (arXiv 2505.10978) over stored steps: the SQL twin of pipelines/credit/estimators/{gigpo,gigpo_loo}.py.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), state_hash
--          (BIGINT, the anchor), reward, episode_score (DOUBLE), status (completed | truncated | aborted | failed),
--          is_active, is_action_valid (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two
--          counts as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score and one status.
-- Options  the fields of the class GiGPO, under the same names: $gamma, $omega, $combination, $episode_norm,
--          $step_norm, $baseline, $singleton, $invalid_action_penalty, $episode_source, $step_source,
--          $default_step_reward, $truncated, $revisits. gigpo_loo: both norms leave_one_out, trajectories, zero.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags.
WITH
options AS (
    SELECT
        CASE $combination WHEN 'sum' THEN 1 ELSE $omega::DOUBLE END AS episode_weight,
        CASE $combination WHEN 'sum' THEN $omega::DOUBLE ELSE 1 - $omega::DOUBLE END AS step_weight,
        $episode_norm AS scaling,
        $step_norm AS step_scaling,
        false AS population,
        $baseline = 'rows' AS by_rows,
        $singleton = 'zero' AS singleton_is_zero,
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

visits AS (
    SELECT
        1 AS level,
        group_id,
        state_hash AS key,
        episode_id,
        step_index,
        return_to_go - CASE WHEN coalesce(is_action_valid, true) THEN 0 ELSE penalty END AS step_score,
        NOT is_excluded AS is_included
    FROM returns, options
),

-- include anchor_groups

credited AS (
    SELECT
        anchored.*,
        a_episode,
        a AS a_step,
        CASE WHEN episode_weight = 0 THEN 0 ELSE episode_weight * a_episode END
        + CASE WHEN step_weight = 0 THEN 0 ELSE step_weight * a END AS advantage
    FROM anchored
    INNER JOIN episode_advantages USING (episode_id, step_index)
    CROSS JOIN options
)

-- include anchored_rows
