-- Episode advantages: the SQL twin of pipelines/credit/estimators/{grpo,dr_grpo,rloo,maxrl}.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active, is_action_valid
--          (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two counts as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, at a reward or score that is not a finite
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
        $scaling AS scaling,
        $baseline = 'rows' AS by_rows,
        $singleton = 'zero' AS singleton_is_zero,
        $invalid_action_penalty::DOUBLE AS penalty
),

given AS (
    SELECT episode_id, group_id, step_index, reward, episode_score, status, is_active, is_action_valid
    FROM query_table($steps)
),

-- include active

-- include episodes

members AS (
    SELECT
        group_id,
        episode_id,
        CASE
            WHEN $scaling = 'mean_ratio' AND member_score < 0
                THEN error(format('steps: episode {}: a negative score has no ratio to a mean', episode_id))
            ELSE member_score
        END AS member_score
    FROM episodes
),

-- include siblings

-- include episode_advantages

credited AS (SELECT episode_id, step_index, a_episode, NULL::VARCHAR AS unknown FROM episode_advantages)

-- include sibling_rows
