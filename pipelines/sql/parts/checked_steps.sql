-- active, from given: the active steps, after the one check that every twin goes through. It refuses what
-- pipelines/credit/steps.py refuses.
-- t: number among the active steps of the episode. is_excluded: the episode takes part in nothing. is_masked: it has no
-- advantages of its own.
numbered AS (
    SELECT
        *,
        coalesce(is_active, true) AS is_used,
        row_number() OVER in_order - 1 AS expected_index,
        lag(group_id, 1, group_id) OVER in_order AS group_before,
        lag(status, 1, status) OVER in_order AS status_before,
        lag(episode_score, 1, episode_score) OVER in_order AS score_before,
        count(*) FILTER (WHERE is_used) OVER in_order - 1 AS t,
        count(*) FILTER (WHERE is_used) OVER (in_order ROWS BETWEEN 1 FOLLOWING AND UNBOUNDED FOLLOWING) AS num_later
    FROM given
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY step_index)
),

checked AS (
    SELECT
        *,
        CASE
            WHEN group_id IS NULL THEN 'group_id is NULL. Every step needs its episode, its group and its number.'
            WHEN episode_id IS NULL THEN 'episode_id is NULL. Every step needs its episode, its group and its number.'
            WHEN step_index IS NULL THEN 'step_index is NULL. Every step needs its episode, its group and its number.'
            WHEN step_index <> expected_index
                THEN 'duplicate, missing or negative step. Number the steps of an episode 0, 1, 2, ... once each.'
            WHEN group_id <> group_before THEN 'another group than the step before. An episode belongs to one group.'
            WHEN coalesce(status NOT IN ('completed', 'truncated', 'aborted', 'failed'), true)
                THEN 'status is invalid; valid: completed, truncated, aborted, failed. Map it to one of them.'
            WHEN status <> status_before THEN 'another status than the step before. Join it by episode_id.'
            WHEN episode_score IS DISTINCT FROM score_before
                THEN 'another episode_score than the step before. Join it by episode_id.'
            WHEN is_used AND NOT abs(reward) <= 1e100
                THEN 'reward is not a finite number below 1e100. Write NULL where it is not known.'
            WHEN NOT abs(episode_score) <= 1e100
                THEN 'episode_score is not a finite number below 1e100. Write NULL where the episode is not scored.'
        END AS fault
    FROM numbered
),

active AS (
    SELECT
        * EXCLUDE (is_active, is_used, expected_index, group_before, status_before, score_before, num_later, fault)
        REPLACE (coalesce(reward, $default_step_reward::DOUBLE) AS reward),
        num_later = 0 AS is_last,
        status = 'truncated' AS is_truncated,
        status IN ('aborted', 'failed') AND episode_score IS NULL
        OR status = 'truncated' AND $truncated = 'exclude' AS is_excluded,
        status = 'truncated' AND $truncated = 'mask' AS is_masked
    FROM checked
    -- One expression: of two conditions DuckDB may try is_used first, and leave the faults of inactive steps alone.
    WHERE CASE
        WHEN fault IS NOT NULL
            THEN error(
                concat('steps: ', concat_ws(', ', 'episode ' || episode_id, 'step_index ' || step_index), ': ', fault)
            )
        ELSE is_used
    END
),
