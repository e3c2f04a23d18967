-- The rows, from returns, episodes, siblings and credited (episode_id, step_index, a_episode, a_step, advantage, and what
-- `anchored` says of the state).
SELECT
    episode_id,
    step_index,
    group_id,
    state_hash AS anchor_key,
    return_to_go,
    a_episode,
    a_step,
    CASE WHEN NOT is_masked THEN advantage END AS advantage,
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
        CASE WHEN state_hash IS NULL THEN 'unknown_state' END,
        CASE WHEN score IS NULL THEN 'unscored' END
    ) AS flags
FROM returns
INNER JOIN episodes USING (group_id, episode_id)
INNER JOIN siblings USING (group_id)
INNER JOIN credited USING (episode_id, step_index)
ORDER BY group_id, episode_id, step_index
