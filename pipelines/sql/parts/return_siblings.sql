-- siblings, from returns: trajectories that take part and whose whole return is known.
siblings AS (
    SELECT group_id, count(*) FILTER (WHERE t = 0 AND NOT is_excluded AND return_to_go IS NOT NULL)::INTEGER AS group_size
    FROM returns
    GROUP BY group_id
),
