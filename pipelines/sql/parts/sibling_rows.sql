-- The rows, from active, episodes, siblings and credited (episode_id, step_index, a_episode; unknown: a flag or NULL).
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
        unknown,
        CASE WHEN score IS NULL THEN 'unscored' END
    ) AS flags
FROM active
INNER JOIN episodes USING (group_id, episode_id)
INNER JOIN siblings USING (group_id)
INNER JOIN credited USING (episode_id, step_index)
ORDER BY group_id, episode_id, step_index
