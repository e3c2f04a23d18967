-- OPO (arXiv 2505.23585): the SQL twin of pipelines/credit/estimators/opo.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score, completion_tokens (numbers; the last two of the episode, repeated for every step), status
--          (completed | truncated | aborted | failed), is_active (BOOLEAN). NULL is unknown; NULL in the last one counts
--          as true.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a number that is not finite.
--          Assumed, not checked: an episode has one group, one score, one status and one length.
-- Options  the fields of the class OPO, under the same names: $length, $episode_source, $default_step_reward, $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, return_to_go,
--          a_step; anchor_size and anchor_episodes are 0.
WITH
given AS (
    SELECT episode_id, group_id, step_index, reward, episode_score, completion_tokens, status, is_active
    FROM query_table($steps)
),

-- include active

-- include episodes

lengths AS (
    SELECT
        episode_id,
        any_value(completion_tokens)::DOUBLE AS tokens,
        CASE
            WHEN $length = 'steps' THEN count(*)
            WHEN NOT abs(tokens) <= 1e100
                THEN error(format('steps: episode {}: completion_tokens not finite, or beyond 1e100', episode_id))
            ELSE tokens
        END AS length
    FROM active
    GROUP BY episode_id
),

members AS (
    SELECT group_id, episode_id, length, CASE WHEN length IS NOT NULL THEN member_score END AS member_score
    FROM episodes
    INNER JOIN lengths USING (episode_id)
),

-- include siblings

-- The mean weighted by length; the plain mean if no length is above 0.
baselines AS (
    SELECT
        group_id,
        CASE
            WHEN sum(length) > 0 THEN sum(length * member_score) / sum(length)
            ELSE avg(member_score)
        END AS baseline
    FROM members
    WHERE member_score IS NOT NULL
    GROUP BY group_id
),

credited AS (
    SELECT
        episode_id,
        step_index,
        CASE
            WHEN member_score IS NULL THEN NULL
            WHEN is_dead OR group_size = 1 THEN 0
            ELSE member_score - baseline
        END AS a_episode,
        CASE WHEN length IS NULL THEN 'unknown_length' END AS unknown
    FROM active
    INNER JOIN members USING (group_id, episode_id)
    INNER JOIN siblings USING (group_id)
    LEFT JOIN baselines USING (group_id)
)

-- include sibling_rows
