-- GDPO (arXiv 2601.05242): the SQL twin of pipelines/credit/estimators/gdpo.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), reward (DOUBLE),
--          status (completed | truncated | aborted | failed), is_active (BOOLEAN), a column score_<name> (a number) for
--          each component and the column that $batch_key names, both of the episode, repeated for every step. NULL is
--          unknown; NULL in is_active counts as true. A NULL batch is none. Every column whose name begins with score_ is
--          read as numbers.
--          Stops at a NULL key, at a wrong step number, at an unknown status, at a number that is not finite, at a
--          component without a column, and at a score that changes within an episode. Assumed, not checked: an episode
--          has one group, one status and one batch.
-- Options  the fields of the class GDPO, under the same names: $components (MAP: name -> weight), $batch_key (all: one
--          batch), $episode_source (score), $default_step_reward, $truncated.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags. NULL where the estimator computes nothing: anchor_key, return_to_go,
--          a_step; anchor_size and anchor_episodes are 0.
WITH
-- One row per episode and component.
components AS (
    SELECT DISTINCT episode_id, weighted.key AS name, weighted.value AS weight, component
    FROM (SELECT episode_id, COLUMNS('^score_')::DOUBLE FROM query_table($steps))
        UNPIVOT INCLUDE NULLS (component FOR score_name IN (COLUMNS('^score_')))
    INNER JOIN (SELECT unnest(map_entries($components)) AS weighted) ON score_name = 'score_' || weighted.key
),

-- What is known of an episode is the sum of all its scores: NULL where one is.
known AS (
    SELECT
        episode_id,
        CASE
            WHEN count(*) <> cardinality($components)
                THEN error(format('steps: episode {}: a component has no column score_<name>, or two values', episode_id))
            WHEN count(component) = count(*) THEN sum(component)
        END AS episode_score
    FROM components
    GROUP BY episode_id
),

given AS (
    SELECT
        episode_id,
        group_id,
        step_index,
        reward,
        known.episode_score,
        status,
        is_active,
        struct_extract(stored, $batch_key) AS batch
    FROM (SELECT *, 0 AS "all" FROM query_table($steps)) AS stored
    LEFT JOIN known USING (episode_id)
),

-- include active

-- include episodes

-- include members_of_batches

component_moments AS (
    SELECT
        group_id,
        name,
        count(*) AS n,
        avg(component) AS mean,
        n >= 2 AND max(component) - min(component) <= 1e-9 * greatest(1, abs(max(component))) AS is_tied,
        stddev_samp(component) AS deviation
    FROM members
    INNER JOIN components USING (episode_id)
    WHERE member_score IS NOT NULL
    GROUP BY group_id, name
),

-- Dead is a group in which every component is constant.
siblings AS (
    SELECT group_id, count(member_score)::INTEGER AS group_size, coalesce(any_value(is_dead), false) AS is_dead
    FROM members
    LEFT JOIN (
        SELECT group_id, bool_and(is_tied) AS is_dead FROM component_moments GROUP BY group_id
    ) AS verdicts USING (group_id)
    GROUP BY group_id
),

normalised AS (
    SELECT
        episode_id,
        sum(weight * CASE WHEN is_tied OR n = 1 THEN 0 ELSE (component - mean) / (deviation + 1e-6) END) AS z
    FROM members
    INNER JOIN components USING (episode_id)
    INNER JOIN component_moments USING (group_id, name)
    GROUP BY episode_id
),

-- Silent groups count in the batch's statistics and stay exactly 0.
compared AS (
    SELECT
        group_id,
        episode_id,
        batch,
        is_dead OR group_size = 1 AS is_silent,
        CASE WHEN member_score IS NOT NULL THEN z END AS value
    FROM members
    INNER JOIN siblings USING (group_id)
    LEFT JOIN normalised USING (episode_id)
),

-- include whitened

-- include silent_zero

-- include sibling_rows
