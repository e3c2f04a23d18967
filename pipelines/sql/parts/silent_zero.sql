-- credited, from active and whitened (is_silent: the group says nothing): A_E, exactly 0 for silent groups.
credited AS (
    SELECT
        episode_id,
        step_index,
        CASE WHEN a IS NOT NULL AND is_silent THEN 0 ELSE a END AS a_episode,
        CASE WHEN whitened.batch IS NULL THEN 'unknown_batch' END AS unknown
    FROM active
    INNER JOIN whitened USING (group_id, episode_id)
)
