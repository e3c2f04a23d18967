-- members, from active and episodes: the trajectories with their batches.
members AS (
    SELECT group_id, episode_id, batch, member_score
    FROM episodes
    INNER JOIN (SELECT episode_id, any_value(batch) AS batch FROM active GROUP BY episode_id) USING (episode_id)
),
