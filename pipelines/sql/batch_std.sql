-- Group mean, batch deviation (arXiv 2508.08221): the SQL twin of pipelines/credit/estimators/batch_std.py.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active (BOOLEAN), and the column
--          that $batch_key names, of the episode, repeated for every step. NULL is unknown; NULL in is_active counts as
--          true. A NULL batch is none.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score, one status and one batch.
-- Options  the fields of the class BatchStd, under the same names: $batch_key (all: one batch), $episode_source,
--          $default_step_reward, $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, return_to_go,
--          a_step; anchor_size and anchor_episodes are 0.
WITH
-- include given_in_batches

-- include active

-- include episodes

-- include members_of_batches

-- include siblings

compared AS (SELECT group_id, episode_id, batch, member_score AS value FROM members),

-- include whitened

credited AS (
    SELECT
        episode_id,
        step_index,
        CASE
            WHEN value IS NULL OR whitened.batch IS NULL THEN NULL
            WHEN is_dead OR group_size = 1 THEN 0
            ELSE (value - mean) / (batch_deviation + 1e-6)
        END AS a_episode,
        CASE WHEN whitened.batch IS NULL THEN 'unknown_batch' END AS unknown
    FROM active
    INNER JOIN whitened USING (group_id, episode_id)
    INNER JOIN siblings USING (group_id)
)

-- include sibling_rows
