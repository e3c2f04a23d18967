-- Episode advantages: the SQL twin of pipelines/credit/estimators/{grpo,dr_grpo,rloo,maxrl}.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active, is_action_valid
--          (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two counts as true.
--          Stops at what the job refuses: a NULL key, a wrong step number, an unknown status, a group, status or score
--          that changes within an episode, a reward or score that is not a finite number, and under mean_ratio a
--          negative score.
-- Options  $scaling: mean_std_norm (grpo), mean_norm (dr_grpo), leave_one_out (rloo), mean_ratio (maxrl). The fields of
--          the classes, under the same names: $episode_source, $default_step_reward, $truncated, and for grpo and
--          dr_grpo $baseline, $singleton, $invalid_action_penalty (for the others trajectories, zero and 0).
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, return_to_go,
--          a_step; anchor_size and anchor_episodes are 0.
WITH
options AS (SELECT $scaling AS scaling),

given AS (
    SELECT episode_id, group_id, step_index, reward, episode_score, status, is_active, is_action_valid
    FROM query_table($steps)
),

-- include checked_steps

-- include episode_advantages

credited AS (
    SELECT *
    FROM active
    INNER JOIN episodes USING (group_id, episode_id)
    INNER JOIN siblings USING (group_id)
    INNER JOIN episode_advantages USING (episode_id, step_index)
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
FROM credited
ORDER BY group_id, episode_id, step_index
