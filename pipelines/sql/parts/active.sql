-- active, from given: every step, numbered and checked; inactive ones go. t: number among the active steps of the
-- episode. is_excluded: the episode takes part in nothing. is_masked: it has no advantages of its own.
numbered AS (
    SELECT
        *,
        coalesce(is_active, true) AS is_used,
        row_number() OVER in_order - 1 AS expected_index,
        count(*) FILTER (WHERE is_used) OVER in_order - 1 AS t,
        count(*) FILTER (WHERE is_used) OVER (in_order ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS num_later
    FROM given
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY step_index)
),

active AS (
    SELECT
        * EXCLUDE (is_active, is_used, expected_index, num_later)
        REPLACE (coalesce(reward, $default_step_reward::DOUBLE) AS reward),
        num_later = 0 AS is_last,
        status = 'truncated' AS is_truncated,
        status IN ('aborted', 'failed') AND episode_score IS NULL
        OR status = 'truncated' AND $truncated = 'exclude' AS is_excluded,
        status = 'truncated' AND $truncated = 'mask' AS is_masked
    FROM numbered
    WHERE CASE
        WHEN group_id IS NULL THEN error('steps: group_id is NULL. Every step needs its episode, its group and its number')
        WHEN episode_id IS NULL
            THEN error('steps: episode_id is NULL. Every step needs its episode, its group and its number')
        WHEN step_index IS NULL
            THEN error('steps: step_index is NULL. Every step needs its episode, its group and its number')
        WHEN step_index <> expected_index
            THEN error(format('steps: episode {}, step_index {}: wrong step number', episode_id, step_index))
        WHEN coalesce(status NOT IN ('completed', 'truncated', 'aborted', 'failed'), true)
            THEN error(format('steps: episode {}, step_index {}: unknown status', episode_id, step_index))
        WHEN is_used AND NOT abs(reward) <= 1e100
            THEN error(format('steps: episode {}, step_index {}: reward not finite, or beyond 1e100', episode_id, step_index))
        WHEN NOT abs(episode_score) <= 1e100
            THEN error(format('steps: episode {}: episode_score not finite, or beyond 1e100', episode_id))
        ELSE is_used
    END
),
