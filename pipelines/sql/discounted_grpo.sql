-- Discounted GRPO: the SQL twin of pipelines/credit/estimators/discounted_grpo.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active (BOOLEAN). NULL is
--          unknown; NULL in the last one counts as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score and one status.
-- Options  the fields of the class DiscountedGRPO, under the same names: $compare, $norm, $gamma, $step_source,
--          $default_step_reward, $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, a_episode;
--          anchor_size and anchor_episodes are 0.
WITH
given AS (
    SELECT episode_id, group_id, step_index, reward, episode_score, status, is_active
    FROM query_table($steps)
),

-- include active

-- include returns

-- include return_siblings

-- place: a step is compared with those of its group that have the same.
compared AS (
    SELECT
        group_id,
        episode_id,
        step_index,
        CASE $compare WHEN 'same_step' THEN t ELSE 0 END AS place,
        CASE WHEN NOT is_excluded THEN return_to_go END AS value
    FROM returns
),

moments AS (
    SELECT
        group_id,
        place,
        count(value) AS n,
        avg(value) AS mean,
        n >= 2 AND max(value) - min(value) <= 1e-9 * greatest(1, abs(max(value))) AS is_tied,
        stddev_samp(value) AS deviation
    FROM compared
    GROUP BY group_id, place
),

normalised AS (
    SELECT
        compared.*,
        value IS NOT NULL AND n = 1 AS is_single,
        value IS NOT NULL AND is_tied AS is_constant,
        bool_or(value IS NOT NULL AND NOT is_single AND NOT is_constant) OVER (PARTITION BY group_id) AS speaks,
        CASE
            WHEN value IS NULL THEN NULL
            WHEN is_single OR is_constant THEN 0
            ELSE (value - mean) / CASE WHEN $norm = 'mean_std_norm' THEN deviation + 1e-6 ELSE 1 END
        END AS a
    FROM compared
    INNER JOIN moments USING (group_id, place)
),

credited AS (
    SELECT
        episode_id,
        step_index,
        a AS a_step,
        [
            CASE WHEN is_constant THEN 'constant_step' END,
            CASE WHEN group_size >= 2 AND NOT speaks THEN 'dead_group' END,
            CASE WHEN group_size = 1 THEN 'singleton_group' END,
            CASE WHEN is_single THEN 'singleton_step' END
        ] AS own_flags
    FROM normalised
    INNER JOIN siblings USING (group_id)
)

-- include step_rows
