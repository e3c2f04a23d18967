-- REINFORCE++ (arXiv 2501.03262): the SQL twin of pipelines/credit/estimators/reinforce_pp.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward,
--          episode_score (DOUBLE), status (completed | truncated | aborted | failed), is_active (BOOLEAN), and the column
--          that $batch_key names, of the episode, repeated for every step. NULL is unknown; NULL in is_active counts as
--          true. A NULL batch is none.
--          Stops at a NULL key, at a wrong step number, at an unknown status, and at a reward or score that is not a
--          finite number. Assumed, not checked: an episode has one group, one score, one status and one batch.
-- Options  the fields of the class ReinforcePP, under the same names: $batch_key (all: one batch), $gamma, $step_source,
--          $default_step_reward, $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, a_episode;
--          anchor_size and anchor_episodes are 0.
WITH
-- include given_in_batches

-- include active

-- include returns

-- include return_siblings

compared AS (
    SELECT episode_id, step_index, batch, CASE WHEN NOT is_excluded THEN return_to_go END AS value
    FROM returns
),

-- include whitened

credited AS (
    SELECT
        episode_id,
        step_index,
        a AS a_step,
        [
            CASE WHEN is_constant AND batch IS NOT NULL THEN 'constant_batch' END,
            CASE WHEN is_single AND batch IS NOT NULL THEN 'singleton_batch' END,
            CASE WHEN batch IS NULL THEN 'unknown_batch' END
        ] AS own_flags
    FROM whitened
)

-- include step_rows
