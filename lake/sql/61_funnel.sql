-- funnel: what became of a run's rollouts, from generated to trained.
-- Grain: one row per run and stage, in the order of stage_number: generated, scored, credited, selected, trained.
-- scored: an env_return, a reward or a current score is known. credited: a current advantage is defined. selected: not dropped
-- by the newest selection job that saw the episode, whatever the selection's name; everything, where none did; its
-- reasons are the filters. An episode whose active steps were all dropped is not selected. trained: a training job
-- consumed it. Only generated counts steps that are not active.
-- Columns: those of `episodes`, and these:
--   stage_number: Order of the stages, from 1.
--   stage: generated, scored, credited, selected, trained.
--   episodes: Episodes of the run that reached the stage.
--   steps: Steps that reached the stage; only generated counts steps that are not active.
--   missing: Episodes of the run that did not reach it.
--   reasons: Why, as a list of {reason, episodes}, most frequent first; for generated: how the rollouts ended.
--   step_reasons: Why single steps of episodes that did reach it did not, as a list of {reason, steps}; of selected
--       only, empty elsewhere.
CREATE VIEW funnel AS
WITH known_rewards AS (
    SELECT episode_id, step_index FROM steps WHERE is_active AND reward IS NOT NULL
    UNION
    SELECT episode_id, step_index FROM current_scores WHERE step_index IS NOT NULL AND value IS NOT NULL
),

known_returns AS (
    SELECT episode_id FROM episodes WHERE env_return IS NOT NULL
    UNION
    SELECT episode_id FROM current_scores WHERE step_index IS NULL AND value IS NOT NULL
),

newest_selections AS (
    SELECT s.*
    FROM selections AS s
    JOIN (
        SELECT g.episode_id, arg_max(g.job_id, ended_order(r.sequence, r.ended_at, g.job_id)) AS job_id
        FROM (SELECT DISTINCT episode_id, job_id FROM selections) AS g
        JOIN job_runs AS r USING (job_id)
        GROUP BY g.episode_id
    ) AS newest USING (episode_id, job_id)
),

dropped AS (
    SELECT
        episode_id,
        coalesce(min(filter), 'dropped') AS filter
    FROM newest_selections
    WHERE step_index IS NULL AND NOT kept
    GROUP BY episode_id
),

dropped_steps AS (
    SELECT
        s.episode_id,
        s.step_index,
        coalesce(min(n.filter), 'dropped') AS filter
    FROM newest_selections AS n
    JOIN steps AS s ON s.episode_id = n.episode_id AND s.step_index = n.step_index
    WHERE n.step_index IS NOT NULL AND NOT n.kept AND s.is_active
    GROUP BY s.episode_id, s.step_index
),

credited AS (
    SELECT episode_id, count(DISTINCT step_index) FILTER (defined) AS steps FROM current_advantages GROUP BY episode_id
),

trained AS (SELECT episode_id, count(DISTINCT step_index) AS steps FROM step_seen GROUP BY episode_id),

of_episodes AS (
    SELECT
        e.run_id,
        e.episode_id,
        e.status,
        e.num_steps AS steps,
        coalesce(k.steps, 0) AS steps_scored,
        k.steps IS NOT NULL OR r.episode_id IS NOT NULL AS is_scored,
        c.steps AS steps_credited,
        d.episode_id IS NULL AND coalesce(x.steps < a.active, true) AS is_selected,
        coalesce(d.filter, x.filter) AS filter,
        a.active - coalesce(x.steps, 0) AS steps_selected,
        t.steps AS steps_trained
    FROM episodes AS e
    LEFT JOIN (SELECT episode_id, count(*) AS steps FROM known_rewards GROUP BY episode_id) AS k
        ON k.episode_id = e.episode_id
    LEFT JOIN known_returns AS r ON r.episode_id = e.episode_id
    LEFT JOIN credited AS c ON c.episode_id = e.episode_id
    LEFT JOIN dropped AS d ON d.episode_id = e.episode_id
    LEFT JOIN (SELECT episode_id, count(*) FILTER (is_active) AS active FROM steps GROUP BY episode_id) AS a
        ON a.episode_id = e.episode_id
    LEFT JOIN (SELECT episode_id, count(*) AS steps, min(filter) AS filter FROM dropped_steps GROUP BY episode_id) AS x
        ON x.episode_id = e.episode_id
    LEFT JOIN trained AS t ON t.episode_id = e.episode_id
),

stages AS (
    SELECT run_id, episode_id, 1 AS stage_number, 'generated' AS stage, true AS reached, steps, status AS reason
    FROM of_episodes
    UNION ALL
    SELECT run_id, episode_id, 2, 'scored', is_scored, steps_scored, CASE WHEN NOT is_scored THEN 'unscored' END
    FROM of_episodes
    UNION ALL
    SELECT
        run_id,
        episode_id,
        3,
        'credited',
        coalesce(steps_credited > 0, false),
        coalesce(steps_credited, 0),
        CASE WHEN steps_credited IS NULL THEN 'not in the current credit' WHEN steps_credited = 0 THEN 'advantage unknown' END
    FROM of_episodes
    UNION ALL
    SELECT run_id, episode_id, 4, 'selected', is_selected, steps_selected, CASE WHEN NOT is_selected THEN filter END
    FROM of_episodes
    UNION ALL
    SELECT
        run_id,
        episode_id,
        5,
        'trained',
        steps_trained IS NOT NULL,
        coalesce(steps_trained, 0),
        CASE WHEN steps_trained IS NULL THEN 'not consumed' END
    FROM of_episodes
),

reasons AS (
    SELECT
        run_id,
        stage_number,
        list({'reason': reason, 'episodes': n} ORDER BY n DESC, reason) AS reasons
    FROM (
        SELECT run_id, stage_number, reason, count(*) AS n FROM stages
        WHERE reason IS NOT NULL GROUP BY run_id, stage_number, reason
    )
    GROUP BY run_id, stage_number
),

step_reasons AS (
    SELECT
        run_id,
        4 AS stage_number,
        list({'reason': filter, 'steps': n} ORDER BY n DESC, filter) AS reasons
    FROM (
        SELECT e.run_id, x.filter, count(*) AS n
        FROM dropped_steps AS x JOIN of_episodes AS e ON e.episode_id = x.episode_id
        WHERE e.is_selected GROUP BY e.run_id, x.filter
    )
    GROUP BY run_id
)

SELECT
    s.run_id,
    s.stage_number,
    s.stage,
    count(*) FILTER (s.reached) AS episodes,
    coalesce(sum(s.steps) FILTER (s.reached), 0)::BIGINT AS steps,
    count(*) FILTER (NOT s.reached) AS missing,
    coalesce(any_value(r.reasons), []) AS reasons,
    coalesce(any_value(x.reasons), []) AS step_reasons
FROM stages AS s
LEFT JOIN reasons AS r ON r.run_id = s.run_id AND r.stage_number = s.stage_number
LEFT JOIN step_reasons AS x ON x.run_id = s.run_id AND x.stage_number = s.stage_number
GROUP BY s.run_id, s.stage_number, s.stage;
