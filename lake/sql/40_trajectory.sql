-- trajectory: an episode as it is read.
-- Grain: one row per decision. ORDER BY episode_id, step_index gives reading order.
-- Columns: those of `steps` and `episodes`, and these:
--   policy_version: Version that sampled the decision.
--   started_at: When the step began.
--   reward_so_far: Sum of the known rewards up to this step; NULL while none is known.
--   is_last: The episode's last decision; what came after it is episodes.final_observation.
CREATE VIEW trajectory AS
SELECT
    s.episode_id,
    s.step_index,
    s.run_id,
    e.task_id,
    s.group_id,
    e.rollout_index,
    e.status,
    e.env_return,
    e.num_steps,
    s.state_role,
    s.state,
    s.reasoning,
    s.action,
    s.tool_calls,
    s.reward,
    sum(s.reward) OVER (
        -- By run and group too, which an episode has one of: conditions on them pass through a window then.
        PARTITION BY s.run_id, s.group_id, s.episode_id
        ORDER BY s.step_index ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW
    ) AS reward_so_far,
    s.step_index = e.num_steps - 1 AS is_last,
    s.is_action_valid,
    s.is_active,
    s.state_is_error,
    s.finish_reason,
    s.policy_version,
    s.started_at,
    s.latency
FROM steps AS s
-- Runs and groups are equal wherever episodes are: said so that a condition on one side spares files on both.
JOIN episodes AS e ON e.episode_id = s.episode_id AND e.group_id = s.group_id AND e.run_id = s.run_id;
