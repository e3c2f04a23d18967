"""The ten questions, as somebody who trains an agent would ask them, and the SQL of their answers.

Each answer is one row. It names what is to blame and, in `next_FIGURE`, how far the runner-up is: nothing else in the
lake comes close, so that there is one answer.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """A question, and how its answer follows from the lake."""

    name: str
    question: str
    sql: str
    figure: str | None
    """The column that tells the cause from all else: `next_FIGURE` is the runner-up's. None: nothing else is there."""


CALLS = """
    calls AS (
        SELECT e.run_id, e.collection_round, e.task_id, e.episode_id,
               json_extract_string(s.tool_calls, '$[0].function.name') AS tool,
               coalesce(n.state_is_error, false) AS failed
        FROM steps AS s
        JOIN episodes AS e ON e.episode_id = s.episode_id
        JOIN steps AS n ON n.episode_id = s.episode_id AND n.step_index = s.step_index + 1
        WHERE s.tool_calls <> '[]'
    )"""
"""Calls of tools: whether the state that followed is an error text."""

REWARD_FELL = f"""
    WITH {CALLS},
    by_task AS (
        SELECT task_id, avg(env_return) FILTER (collection_round BETWEEN 8 AND 11)
                        - avg(env_return) FILTER (collection_round BETWEEN 12 AND 15) AS fall
        FROM episodes WHERE run_id = 'shop' GROUP BY task_id
    ),
    fell AS (SELECT * FROM by_task WHERE fall > 0.3),
    failing AS (
        SELECT tool, min(collection_round) AS first_round FROM calls
        WHERE run_id = 'shop' AND failed AND task_id IN (SELECT task_id FROM fell)
        GROUP BY tool ORDER BY count(*) DESC LIMIT 1
    )
    SELECT tool, first_round, (SELECT string_agg(task_id, ' ' ORDER BY task_id) FROM fell) AS tasks,
           (SELECT avg(fall) FROM fell) AS fall,
           (SELECT max(fall) FROM by_task WHERE task_id NOT IN (SELECT task_id FROM fell)) AS next_fall
    FROM failing
    """

FALSE_ANCHOR = """
    WITH visits AS (
        SELECT a.anchor_key, abs(a.a_step) AS size, s.state, e.task_id,
               json_extract_string(b.tool_calls, '$[0].function.name') AS way_in
        FROM current_advantages AS a
        JOIN steps AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
        JOIN episodes AS e ON e.episode_id = a.episode_id
        LEFT JOIN steps AS b ON b.episode_id = a.episode_id AND b.step_index = a.step_index - 1
        WHERE a.anchor_episodes > 1
    ),
    shares AS (
        SELECT any_value(state) AS state, sum(size) / (SELECT sum(size) FROM visits) AS share, count(*) AS steps,
               count(DISTINCT task_id) AS tasks, string_agg(DISTINCT way_in, ' ' ORDER BY way_in) AS ways_in
        FROM visits GROUP BY anchor_key
    )
    SELECT *, (SELECT max(share) FROM shares AS o WHERE o.state <> s.state) AS next_share,
           (SELECT max(tasks) FROM shares AS o WHERE o.state <> s.state) AS next_tasks
    FROM shares AS s ORDER BY share DESC LIMIT 1
    """

TOOL_BEGAN_TO_FAIL = f"""
    WITH {CALLS},
    per_round AS (
        SELECT tool, collection_round, avg(failed::INT) AS share FROM calls WHERE run_id = 'shop' GROUP BY ALL
    ),
    tools AS (
        SELECT tool, min(collection_round) FILTER (share > 0) AS first_round,
               avg(share) FILTER (share > 0) AS failing_share
        FROM per_round GROUP BY tool HAVING max(share) > 0
    ),
    hurt AS (
        SELECT c.tool, avg(e.env_return) AS success_after_error
        FROM (SELECT DISTINCT tool, episode_id FROM calls WHERE failed AND run_id = 'shop') AS c
        JOIN episodes AS e USING (episode_id) GROUP BY c.tool
    )
    SELECT tool, first_round, failing_share, success_after_error,
           (SELECT max(success_after_error) FROM hurt AS o WHERE o.tool <> tools.tool) AS next_success_after_error
    FROM tools JOIN hurt USING (tool) ORDER BY success_after_error DESC LIMIT 1
    """

UPDATE_17 = """
    WITH taken AS (
        SELECT b.optimizer_step, b.episode_id, e.task_id, e.group_id, sum(abs(a.advantage)) AS size,
               bool_or(contains(a.flags, 'dead_group')) AS dead
        FROM trained_batches AS b
        JOIN job_runs AS r ON r.job_id = b.job_id AND r.run_id = 'shop'
        JOIN episodes AS e ON e.episode_id = b.episode_id
        JOIN current_advantages AS a ON a.episode_id = b.episode_id
        GROUP BY ALL
    ),
    updates AS (
        SELECT optimizer_step, count(*) AS episodes, avg(dead::INT) AS dead_share,
               count(DISTINCT group_id) FILTER (size > 0) AS groups_with_signal,
               string_agg(DISTINCT task_id, ' ' ORDER BY task_id) FILTER (size > 0) AS tasks_with_signal
        FROM taken GROUP BY optimizer_step
    )
    SELECT tasks_with_signal AS task, groups_with_signal, episodes, dead_share,
           (SELECT min_by(step, value) FROM run_metrics WHERE run_id = 'shop' AND name = 'grad_norm')
           AS smallest_gradient,
           (SELECT max(dead_share) FROM updates WHERE optimizer_step <> 17) AS next_dead_share,
           (SELECT min(groups_with_signal) FROM updates WHERE optimizer_step <> 17) AS next_groups_with_signal
    FROM updates WHERE optimizer_step = 17
    """

LENGTH_HACKING = """
    WITH per_round AS (
        SELECT e.run_id, e.collection_round, avg(e.env_return) AS success, avg(s.value) AS judge,
               avg(e.completion_tokens) AS tokens
        FROM episodes AS e JOIN current_scores AS s USING (episode_id)
        WHERE s.scorer = 'judge' AND s.step_index IS NULL AND e.split = 'train' GROUP BY ALL
    ),
    growing AS (
        SELECT *, tokens / lag(tokens) OVER (PARTITION BY run_id ORDER BY collection_round) AS growth FROM per_round
    ),
    first AS (
        SELECT run_id, min(collection_round) AS first_round, arg_min(growth, collection_round) - 1 AS growth
        FROM growing WHERE growth > 1.15 GROUP BY run_id
    )
    SELECT f.run_id AS run, f.first_round, f.growth, g.judge_before, g.judge_after, g.success_before, g.success_after,
           (SELECT max(growth) - 1 FROM growing WHERE run_id <> f.run_id OR collection_round < f.first_round)
           AS next_growth
    FROM first AS f
    JOIN (
        SELECT p.run_id, avg(judge) FILTER (collection_round = first_round - 1) AS judge_before,
               arg_max(judge, collection_round) AS judge_after,
               avg(success) FILTER (collection_round = first_round - 1) AS success_before,
               arg_max(success, collection_round) AS success_after
        FROM per_round AS p JOIN first USING (run_id) GROUP BY p.run_id
    ) AS g USING (run_id)
    """

TWO_RUNS = """
    WITH settings AS (
        SELECT run_id, unnest(json_keys(parameters)) AS setting, parameters FROM job_runs
        WHERE kind = 'collect' AND run_id IN ('shop', 'shop-short')
        QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY started_at) = 1
    ),
    differing AS (
        SELECT setting, max(value) FILTER (run_id = 'shop') AS of_shop,
               max(value) FILTER (run_id = 'shop-short') AS of_shop_short
        FROM (SELECT run_id, setting, json_extract_string(parameters, '$.' || setting) AS value FROM settings)
        GROUP BY setting HAVING of_shop <> of_shop_short
    ),
    by_task AS (
        SELECT regexp_extract(task_id, '[a-z]+') AS family,
               avg(env_return) FILTER (run_id = 'shop') - avg(env_return) FILTER (run_id = 'shop-short') AS fall,
               avg((status = 'truncated')::INT) FILTER (run_id = 'shop-short') AS truncated
        FROM episodes WHERE collection_round < 10 AND run_id IN ('shop', 'shop-short') GROUP BY family
    )
    SELECT setting, of_shop, of_shop_short, family, fall, truncated,
           (SELECT max(fall) FROM by_task AS o WHERE o.family <> by_task.family) AS next_fall
    FROM differing, by_task ORDER BY fall DESC LIMIT 1
    """

SIBLING_STEP = """
    WITH taken AS (
        SELECT s.step_index, s.state, e.env_return, e.episode_id,
               coalesce(json_extract_string(s.tool_calls, '$[0].function.name'), 'reply') AS tool
        FROM steps AS s JOIN episodes AS e USING (episode_id)
        WHERE e.run_id = 'shop' AND e.task_id = 'exchange-2' AND e.collection_round = 10
    ),
    parted AS (SELECT min(step_index) AS step FROM (
        SELECT step_index FROM taken GROUP BY step_index HAVING count(DISTINCT tool) > 1
    )),
    choices AS (
        SELECT step_index, tool, avg(env_return) AS success, count(DISTINCT state) AS states FROM taken
        WHERE step_index = (SELECT step FROM parted) GROUP BY ALL
    )
    SELECT step_index AS step, arg_max(tool, success) AS better, max(success) AS success,
           arg_min(tool, success) AS worse, min(success) AS next_success, max(states) AS states
    FROM choices GROUP BY step_index
    """

SCORER_AGAINST_PEOPLE = """
    WITH people AS (SELECT episode_id, avg(value) AS rating FROM latest_annotations WHERE label = 'rating' GROUP BY 1),
    compared AS (
        SELECT s.scorer, -corr(s.value, p.rating) AS against, count(*) AS episodes,
               avg(s.value) FILTER (p.rating > 0.5) AS where_good, avg(s.value) FILTER (p.rating < 0.5) AS where_bad
        FROM current_scores AS s JOIN people AS p USING (episode_id)
        WHERE s.step_index IS NULL AND s.scorer <> 'human' GROUP BY s.scorer
        -- The correlation with a constant is NaN, which sorts above all numbers.
        HAVING NOT isnan(against)
    )
    SELECT scorer, against, episodes, where_good, where_bad,
           (SELECT max(against) FROM compared AS o WHERE o.scorer <> compared.scorer) AS next_against
    FROM compared ORDER BY against DESC LIMIT 1
    """

STALE_UPDATE = """
    WITH clipped AS (
        SELECT job_id, step, value AS clipped_high FROM run_metrics
        WHERE run_id = 'shop' AND kind = 'train' AND name = 'clipped_high'
    ),
    ages AS (
        SELECT b.job_id, b.optimizer_step, avg(b.optimizer_step - e.policy_version) AS versions_old,
               any_value(e.collection_round) AS played_in_round
        FROM trained_batches AS b JOIN episodes AS e USING (episode_id) GROUP BY ALL
    )
    SELECT step AS update, clipped_high, versions_old, played_in_round,
           (SELECT max(clipped_high) FROM clipped AS o WHERE o.step <> c.step) AS next_clipped_high,
           (SELECT max(versions_old) FROM ages AS o WHERE o.job_id = c.job_id AND o.optimizer_step <> c.step)
           AS next_versions_old
    FROM clipped AS c JOIN ages AS a ON a.job_id = c.job_id AND a.optimizer_step = c.step
    ORDER BY clipped_high DESC LIMIT 1
    """

STALE_CREDIT = """
    WITH members AS (
        SELECT e.group_id, e.task_id, e.collection_round, e.episode_id,
               e.episode_id IN (SELECT episode_id FROM current_advantages) AS credited,
               e.episode_id IN (SELECT superseded_by FROM retractions WHERE kind = 'superseded') AS replaces
        FROM episodes AS e
    ),
    changed AS (
        SELECT any_value(m.task_id) AS task, any_value(m.collection_round) AS round,
               any_value(g.episodes) - count(*) FILTER (m.credited) AS lost,
               count(*) FILTER (NOT m.credited) AS joined, count(*) FILTER (m.replaces) AS replaced
        FROM members AS m JOIN credit_groups AS g USING (group_id)
        WHERE g.job_id = (SELECT job_id FROM credit_series WHERE is_current) GROUP BY m.group_id
    )
    SELECT max(task) FILTER (replaced = 0) AS retracted_of, max(lost) FILTER (replaced = 0) AS retracted,
           (SELECT any_value(reason) FROM retractions WHERE kind = 'retracted') AS reason,
           max(task) FILTER (replaced > 0) AS replaced_of, max(replaced) AS replaced,
           any_value(round) AS round, count(*) AS groups
    FROM changed WHERE lost > 0 OR joined > 0
    """

CASES = (
    Case(
        "reward_fell",
        "In the run `shop` the reward fell from round 12 on. Why, and in which tasks?",
        REWARD_FELL,
        "fall",
    ),
    Case(
        "false_anchor",
        "Which state that siblings share makes most of the step advantages although it says nothing of the situation?",
        FALSE_ANCHOR,
        "share",
    ),
    Case(
        "tool_began_to_fail",
        "Another tool of the run `shop` began to fail and nobody noticed, because the agent calls it again and gets "
        "there. Which one, and in which round did it begin?",
        TOOL_BEGAN_TO_FAIL,
        "success_after_error",
    ),
    Case(
        "update_17",
        "What did update 17 of the run `shop` learn from? Its gradient is the smallest of all.",
        UPDATE_17,
        "dead_share",
    ),
    Case(
        "length_hacking",
        "In one run the agent learned to please the judge with length. In which one, and from which round on?",
        LENGTH_HACKING,
        "growth",
    ),
    Case(
        "two_runs",
        "The runs `shop` and `shop-short` differ in one setting. In which one, and which tasks does it cost (compare "
        "the rounds 0 to 9 of both)?",
        TWO_RUNS,
        "fall",
    ),
    Case(
        "sibling_step",
        "In round 10 of the run `shop`, half of the siblings of `exchange-2` succeed. At which step do they part, and "
        "which call is the better one?",
        SIBLING_STEP,
        "success",
    ),
    Case(
        "scorer_against_people",
        "Two people rated some episodes. Which scorer says the opposite of what they say?",
        SCORER_AGAINST_PEOPLE,
        "against",
    ),
    Case(
        "stale_update",
        "One update of the run `shop` clipped far more tokens than all others. Which one, and why?",
        STALE_UPDATE,
        "clipped_high",
    ),
    Case(
        "stale_credit",
        "The current credit is older than the data. Which groups changed since, and why?",
        STALE_CREDIT,
        None,
    ),
)
