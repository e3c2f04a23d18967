-- compare_groups: what two sets of advantages say about each group.
-- Grain: one row per group as it was collected, whichever groups the estimators used: two groupings can be compared.
-- `one` and `two` are rows of `advantages`, `state` the expression that says whether a group has a signal.
-- Columns: group_id, run_id, task_id, state_1, state_2 (live, dead, singleton, unscored, absent), change (gained: not
-- live, then live; lost: the reverse; only_1, only_2: absent in the other; same), shared (steps defined in both), only_1,
-- only_2 (defined there alone), pearson, flips (opposite signs), mean_change, max_change of |A_2 - A_1|.
WITH one AS (SELECT episode_id, step_index, advantage AS x, group_size, flags FROM {one} AS a),

two AS (SELECT episode_id, step_index, advantage AS y, group_size, flags FROM {two} AS b),

states_1 AS (
    SELECT e.group_id, {state} AS state FROM one JOIN episodes AS e USING (episode_id) GROUP BY e.group_id
),

states_2 AS (
    SELECT e.group_id, {state} AS state FROM two JOIN episodes AS e USING (episode_id) GROUP BY e.group_id
),

pairs AS (
    SELECT
        coalesce(one.episode_id, two.episode_id) AS episode_id,
        one.x,
        two.y,
        abs(one.x) > $zero AND abs(two.y) > $zero AND sign(one.x) <> sign(two.y) AS flipped
    FROM one FULL JOIN two ON two.episode_id = one.episode_id AND two.step_index = one.step_index
),

of_groups AS (
    SELECT
        e.group_id,
        any_value(e.run_id) AS run_id,
        any_value(e.task_id) AS task_id,
        count(*) FILTER (x IS NOT NULL AND y IS NOT NULL) AS shared,
        count(*) FILTER (x IS NOT NULL AND y IS NULL) AS only_1,
        count(*) FILTER (x IS NULL AND y IS NOT NULL) AS only_2,
        min(x) FILTER (y IS NOT NULL) < max(x) FILTER (y IS NOT NULL)
        AND min(y) FILTER (x IS NOT NULL) < max(y) FILTER (x IS NOT NULL) AS varies,
        corr(x, y) AS pearson,
        count(*) FILTER (flipped) AS flips,
        avg(abs(y - x)) AS mean_change,
        max(abs(y - x)) AS max_change
    FROM pairs JOIN episodes AS e USING (episode_id)
    GROUP BY e.group_id
)

SELECT
    group_id,
    run_id,
    task_id,
    coalesce(s.state, 'absent') AS state_1,
    coalesce(t.state, 'absent') AS state_2,
    CASE
        WHEN s.state IS NULL THEN 'only_2'
        WHEN t.state IS NULL THEN 'only_1'
        WHEN s.state <> 'live' AND t.state = 'live' THEN 'gained'
        WHEN s.state = 'live' AND t.state <> 'live' THEN 'lost'
        ELSE 'same'
    END AS change,
    shared,
    only_1,
    only_2,
    CASE WHEN varies AND isfinite(pearson) THEN greatest(-1, least(1, pearson)) END AS pearson,
    flips,
    mean_change,
    max_change
FROM of_groups
LEFT JOIN states_1 AS s USING (group_id)
LEFT JOIN states_2 AS t USING (group_id)
ORDER BY change IN ('gained', 'lost') DESC, max_change DESC NULLS LAST, group_id
