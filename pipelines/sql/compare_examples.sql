-- compare_examples: the steps about which two sets of advantages disagree most.
-- Grain: one row per step that is defined in both, by falling |A_2 - A_1|, then episode and step; at most $examples.
-- `one` and `two` are rows of `advantages`. The action comes whole; whoever shows it cuts it.
WITH chosen AS (
    SELECT a.episode_id, a.step_index, a.advantage AS advantage_1, b.advantage AS advantage_2
    FROM {one} AS a JOIN {two} AS b ON b.episode_id = a.episode_id AND b.step_index = a.step_index
    WHERE abs(b.advantage - a.advantage) > 0
    ORDER BY abs(b.advantage - a.advantage) DESC, a.episode_id, a.step_index
    LIMIT $examples
)

SELECT
    s.run_id,
    e.task_id,
    e.rollout_index,
    c.episode_id,
    c.step_index,
    c.advantage_1,
    c.advantage_2,
    c.advantage_2 - c.advantage_1 AS change,
    s.group_id,
    s.action,
    s.tool_calls
FROM chosen AS c
JOIN steps AS s ON s.episode_id = c.episode_id AND s.step_index = c.step_index
JOIN episodes AS e ON e.episode_id = c.episode_id
ORDER BY abs(c.advantage_2 - c.advantage_1) DESC, c.episode_id, c.step_index
