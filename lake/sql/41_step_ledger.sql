-- step_ledger: everything known about a step.
-- Grain: one row per step and credit series; a step that no credit job covered has one row, with series_id NULL.
-- Columns: those of `steps` and `advantages`, and these:
--   credit_group_id: Group that the advantage was computed in: that of a grouping, if the series has one.
--   step_scores: Scores of the step: a list of {scorer, value, reason, error}, by scorer (`current_scores`: one
--       version of each).
--   episode_scores: Scores of its episode, likewise.
--   job_id: Job that computed the advantage; NULL without one.
--   series_id: Series of the advantage; NULL where no credit job covered the step.
CREATE VIEW step_ledger AS
WITH judged AS (
    SELECT
        episode_id,
        step_index,
        list(
            {'scorer': scorer, 'value': value, 'reason': reason, 'error': error} ORDER BY scorer, value
        ) AS scores
    FROM current_scores
    GROUP BY episode_id, step_index
)
SELECT
    s.episode_id,
    s.step_index,
    s.run_id,
    s.group_id,
    s.state_hash,
    s.action,
    s.tool_calls,
    s.reward,
    s.is_action_valid,
    s.is_active,
    s.trainable,
    s.policy_version,
    a.series_id,
    a.job_id,
    a.group_id AS credit_group_id,
    a.defined,
    a.return_to_go,
    a.a_episode,
    a.a_step,
    a.advantage,
    a.group_size,
    a.anchor_key,
    a.anchor_size,
    a.anchor_episodes,
    a.flags,
    j.scores AS step_scores,
    w.scores AS episode_scores
FROM steps AS s
LEFT JOIN latest_advantages AS a ON a.episode_id = s.episode_id AND a.step_index = s.step_index
LEFT JOIN (SELECT * FROM judged WHERE step_index IS NOT NULL) AS j
    ON j.episode_id = s.episode_id AND j.step_index = s.step_index
LEFT JOIN (SELECT * FROM judged WHERE step_index IS NULL) AS w ON w.episode_id = s.episode_id;
