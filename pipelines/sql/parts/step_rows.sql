-- The rows, from returns, siblings and credited (episode_id, step_index, a_step; own_flags: names and NULLs).
SELECT
    episode_id,
    step_index,
    group_id,
    NULL::BIGINT AS anchor_key,
    return_to_go,
    NULL::DOUBLE AS a_episode,
    a_step,
    CASE WHEN NOT is_masked THEN a_step END AS advantage,
    group_size,
    0::INTEGER AS anchor_size,
    0::INTEGER AS anchor_episodes,
    coalesce(
        array_to_string(
            list_sort(
                own_flags || [
                    CASE WHEN is_excluded THEN 'excluded' END,
                    CASE WHEN is_masked THEN 'masked' END,
                    CASE WHEN is_truncated THEN 'truncated' END,
                    CASE WHEN return_to_go IS NULL THEN 'unknown_return' END
                ]
            ),
            ','
        ),
        ''
    ) AS flags
FROM returns
INNER JOIN siblings USING (group_id)
INNER JOIN credited USING (episode_id, step_index)
ORDER BY group_id, episode_id, step_index
