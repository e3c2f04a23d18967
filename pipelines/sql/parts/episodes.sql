-- episodes, from active. score: R, NULL if unknown. member_score: the same for those that count as siblings.
episodes AS (
    SELECT
        group_id,
        episode_id,
        CASE
            WHEN $episode_source = 'score' THEN any_value(episode_score)
            WHEN count(reward) = count(*) THEN sum(reward)
        END AS score,
        CASE WHEN NOT is_excluded THEN score END AS member_score
    FROM active
    GROUP BY group_id, episode_id, is_excluded
),
