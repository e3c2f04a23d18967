-- given: the stored steps with the batch that $batch_key names; `all` is one batch.
given AS (
    SELECT
        episode_id,
        group_id,
        step_index,
        reward,
        episode_score,
        status,
        is_active,
        struct_extract(stored, $batch_key) AS batch
    FROM (SELECT *, 0 AS "all" FROM query_table($steps)) AS stored
),
