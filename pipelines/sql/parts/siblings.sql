-- siblings, from members: what the siblings of each group have in common.
siblings AS (
    SELECT
        group_id,
        count(member_score)::INTEGER AS group_size,
        avg(member_score) AS mean,
        coalesce(
            group_size >= 2
            AND max(member_score) - min(member_score) <= 1e-9 * greatest(1, abs(max(member_score))),
            false
        ) AS is_dead,
        CASE WHEN is_dead OR group_size < 2 THEN 0 ELSE stddev_samp(member_score) END AS deviation
    FROM members
    GROUP BY group_id
),
