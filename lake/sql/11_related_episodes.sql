-- related_episodes: which episodes came out of which: sub-agents, forks, continuations.
-- Grain: one row per episode that names a parent. `episodes` has the parent as it was when the child was read; if a retry
-- or a longer reading of its session has superseded it since, parent_episode_id is the attempt that counts now.
-- Columns: those of `episodes`, and these:
--   parent_episode_id: The parent: the attempt that counts now, if a retry has superseded the one that the child
--       names.
CREATE VIEW related_episodes AS
WITH RECURSIVE superseded AS (
    SELECT DISTINCT episode_id, superseded_by FROM retractions WHERE kind = 'superseded'
),

chain AS (
    SELECT episode_id, superseded_by AS successor_id FROM superseded
    UNION
    SELECT c.episode_id, s.superseded_by FROM chain AS c JOIN superseded AS s ON s.episode_id = c.successor_id
),

successors AS (
    SELECT * FROM chain ANTI JOIN superseded ON superseded.episode_id = chain.successor_id
)

SELECT
    e.episode_id,
    coalesce(s.successor_id, e.parent_episode_id) AS parent_episode_id,
    e.relation,
    e.parent_step_index
FROM episodes AS e
LEFT JOIN successors AS s ON s.episode_id = e.parent_episode_id
WHERE e.parent_episode_id IS NOT NULL;
