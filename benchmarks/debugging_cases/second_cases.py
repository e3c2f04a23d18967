"""Ten more questions, about the lake of `second_plan.py`, and the SQL of their answers, in the form of `cases.py`."""

from benchmarks.debugging_cases.cases import Case

_CUT_ANSWERS = """
    WITH shares AS (
        SELECT collection_round, avg((stop_reason = 'max_tokens')::INT) AS cut
        FROM episodes WHERE run_id = 'desk-small' GROUP BY collection_round
    ),
    settings AS (
        SELECT json_extract_string(parameters, '$.max_tokens') AS most,
               row_number() OVER (ORDER BY started_at) AS place
        FROM job_runs WHERE kind = 'collect' AND run_id = 'desk-small'
    ),
    first AS (SELECT min(collection_round) AS first_round FROM shares WHERE cut > 0)
    SELECT first_round, (SELECT avg(cut) FROM shares WHERE collection_round >= first_round) AS cut,
           (SELECT most FROM settings WHERE place = 1) AS max_tokens_before,
           (SELECT most FROM settings WHERE place = 2) AS max_tokens_after,
           (SELECT avg((stop_reason = 'max_tokens')::INT) FROM episodes WHERE run_id <> 'desk-small') AS next_cut
    FROM first
    """

_PAID_FOR_NOTHING = """
    WITH empty AS (
        SELECT e.task_id, e.collection_round,
               e.env_return = 1 AND s.action = '' AND coalesce(s.tool_calls, '[]') = '[]' AS idle
        FROM episodes AS e JOIN steps AS s ON s.episode_id = e.episode_id AND s.step_index = 0
        WHERE e.run_id = 'desk'
    ),
    by_task AS (
        SELECT task_id AS task, avg(idle::INT) AS idle, min(collection_round) FILTER (idle) AS first_round
        FROM empty GROUP BY task_id
    )
    SELECT *, (SELECT max(idle) FROM by_task AS o WHERE o.task <> b.task) AS next_idle
    FROM by_task AS b ORDER BY idle DESC LIMIT 1
    """

_KNOWN_CUSTOMER = """
    WITH trained AS (
        SELECT e.task_id AS task, count(DISTINCT b.optimizer_step) AS updates, min(b.optimizer_step) AS first_update
        FROM trained_batches AS b JOIN episodes AS e USING (episode_id) GROUP BY e.task_id
    ),
    held_out AS (
        SELECT e.task_id AS task, min(n.collection_round) AS first_round, coalesce(any_value(t.updates), 0) AS updates,
               any_value(t.first_update) AS first_update
        FROM (SELECT DISTINCT task_id FROM episodes WHERE run_id = 'desk-eval') AS e
        LEFT JOIN episodes AS n ON n.task_id = e.task_id AND n.run_id = 'desk'
        LEFT JOIN trained AS t ON t.task = e.task_id GROUP BY e.task_id
    )
    SELECT *, (SELECT max(updates) FROM held_out AS o WHERE o.task <> h.task) AS next_updates
    FROM held_out AS h ORDER BY updates DESC LIMIT 1
    """

_SILENT_SCORER = """
    WITH shares AS (
        SELECT s.scorer, e.collection_round, avg((s.value IS NULL)::INT) AS silent, any_value(s.error) AS says
        FROM current_scores AS s JOIN episodes AS e USING (episode_id) WHERE e.run_id = 'desk' GROUP BY ALL
    ),
    scorers AS (
        SELECT scorer, min(collection_round) FILTER (silent > 0) AS first_round, any_value(says) AS says,
               max(silent) AS silent FROM shares GROUP BY scorer
    )
    SELECT *, (SELECT max(silent) FROM scorers AS o WHERE o.scorer <> s.scorer) AS next_silent
    FROM scorers AS s ORDER BY silent DESC LIMIT 1
    """

_NEVER_SOLVED = """
    WITH by_task AS (
        SELECT task_id AS task, 1 - avg(env_return) AS unsolved, max(env_return) AS best
        FROM episodes WHERE run_id = 'desk' GROUP BY task_id
    ),
    worst AS (SELECT * FROM by_task WHERE best = 0)
    SELECT w.task, w.unsolved, r.tool, r.reply, r.replies,
           (SELECT max(env_return) FROM episodes WHERE task_id = w.task) AS best_of_all_runs,
           (SELECT count(*) FROM by_task WHERE best = 0) AS tasks
    FROM worst AS w, (
        SELECT json_extract_string(s.tool_calls, '$[0].function.name') AS tool, any_value(n.state) AS reply,
               count(DISTINCT n.state) AS replies
        FROM worst JOIN episodes AS e ON e.task_id = worst.task
        JOIN steps AS s ON s.episode_id = e.episode_id
        JOIN steps AS n ON n.episode_id = s.episode_id AND n.step_index = s.step_index + 1
        WHERE n.state LIKE '%"in_stock": 0%' AND s.tool_calls <> '[]' GROUP BY tool
    ) AS r
    """

_BROKEN_OFF = """
    WITH last AS (
        SELECT e.run_id, json_extract_string(s.tool_calls, '$[0].function.name') AS tool,
               json_extract_string(s.tool_calls, '$[0].function.arguments') AS arguments, e.error,
               length(e.final_observation) AS size
        FROM episodes AS e JOIN steps AS s ON s.episode_id = e.episode_id AND s.step_index = e.num_steps - 1
        WHERE e.status = 'failed'
    )
    SELECT run_id AS run, tool, count(*) AS episodes, any_value(error) AS error, min(size) AS characters,
           bool_and(contains(arguments, 'claims')) AS all_ask_for_claims,
           (SELECT max(length(state)) FROM steps) AS next_characters
    FROM last GROUP BY run_id, tool
    """

_CARELESS = """
    WITH rules AS (
        SELECT task_id, episode_id, env_return, trim(unnest(string_split(
                   json_extract_string(initial_messages, '$[0].content'), ';'))) AS rule
        FROM episodes WHERE run_id = 'desk-small' AND collection_round = 3
    ),
    of_task AS (SELECT task_id, count(DISTINCT episode_id) AS siblings FROM rules GROUP BY task_id),
    lacking AS (
        SELECT r.task_id, r.rule, any_value(siblings) - count(*) AS without, avg(env_return) AS success_with
        FROM rules AS r JOIN of_task USING (task_id) GROUP BY ALL HAVING without > 0
    )
    SELECT task_id AS task, rule, without, success_with,
           (SELECT avg(env_return) FROM episodes AS e WHERE run_id = 'desk-small' AND collection_round = 3
            AND e.task_id = lacking.task_id AND NOT contains(initial_messages, lacking.rule)) AS next_success_with
    FROM lacking
    """

_AGAIN_AND_AGAIN = """
    WITH repeated AS (
        SELECT e.episode_id, e.task_id AS task, e.collection_round AS round, e.rollout_index,
               json_extract_string(s.tool_calls, '$[0].function.name') AS tool,
               json_extract_string(s.tool_calls, '$[0].function.arguments') AS arguments, count(*) AS calls
        FROM steps AS s JOIN episodes AS e USING (episode_id)
        WHERE e.run_id = 'desk' AND s.tool_calls <> '[]' GROUP BY ALL
    )
    SELECT * EXCLUDE (episode_id),
           (SELECT max(calls) FROM repeated AS o WHERE o.episode_id <> r.episode_id) AS next_calls
    FROM repeated AS r ORDER BY calls DESC LIMIT 1
    """

_UNDONE = """
    WITH changes AS (
        SELECT e.episode_id, e.rollout_index, s.step_index,
               json_extract_string(s.tool_calls, '$[0].function.arguments') AS arguments,
               lag(arguments) OVER (PARTITION BY e.episode_id ORDER BY s.step_index) AS before
        FROM steps AS s JOIN episodes AS e USING (episode_id)
        WHERE e.run_id = 'desk' AND e.collection_round = 9 AND e.task_id = 'address-1'
          AND json_extract_string(s.tool_calls, '$[0].function.name') = 'change_address'
    ),
    failed AS (
        SELECT count(*) FILTER (env_return = 0) AS failed, any_value(episode_id) FILTER (env_return = 0) AS episode_id
        FROM episodes WHERE run_id = 'desk' AND collection_round = 9 AND task_id = 'address-1'
    )
    SELECT f.failed, c.rollout_index, c.step_index AS step,
           json_extract_string(c.before, '$.street') AS street_before,
           json_extract_string(c.arguments, '$.street') AS street,
           (SELECT count(*) FROM changes WHERE before IS NOT NULL) AS second_changes
    FROM failed AS f JOIN changes AS c ON c.episode_id = f.episode_id AND c.before <> c.arguments
    """

_OUT_OF_HAND = """
    WITH training AS (
        SELECT run_id, step, max(value) FILTER (name = 'entropy') AS entropy,
               max(value) FILTER (name = 'learning_rate') AS learning_rate, max(value) FILTER (name = 'kl_k3') AS kl
        FROM run_metrics WHERE kind = 'train' GROUP BY run_id, step
    ),
    changed AS (
        SELECT *, lag(entropy) OVER (PARTITION BY run_id ORDER BY step) - entropy AS fall,
               lag(learning_rate) OVER (PARTITION BY run_id ORDER BY step) AS rate_before
        FROM training
    )
    SELECT step AS update, run_id AS run, fall, rate_before, learning_rate, kl,
           (SELECT max(fall) FROM changed AS o WHERE (o.run_id, o.step) <> (c.run_id, c.step)) AS next_fall
    FROM changed AS c WHERE fall IS NOT NULL ORDER BY fall DESC LIMIT 1
    """

SECOND_CASES = (
    Case(
        "cut_answers",
        "From some round of the run `desk-small` on, the agent's last message often breaks off in the middle of a "
        "sentence. From which round on, and what was changed there?",
        _CUT_ANSWERS,
        "cut",
    ),
    Case(
        "paid_for_nothing",
        "In one task of the run `desk` the agent learned that doing nothing is rewarded. In which task, and from which "
        "round on?",
        _PAID_FOR_NOTHING,
        "idle",
    ),
    Case(
        "known_customer",
        "`desk-eval` should measure the agent on customers that it never met in training. For one task it does not. "
        "Which one, and since which round?",
        _KNOWN_CUSTOMER,
        "updates",
    ),
    Case(
        "silent_scorer",
        "One scorer of the run `desk` gives no value to many rollouts from some round on. Which scorer, from which "
        "round on, and why?",
        _SILENT_SCORER,
        "silent",
    ),
    Case(
        "never_solved",
        "No run ever solves one of the tasks. Which one, and why is it impossible?",
        _NEVER_SOLVED,
        None,
    ),
    Case(
        "broken_off",
        "Some rollouts of the run `desk-small` end by an error before the customer gets an answer. What brings them to "
        "it?",
        _BROKEN_OFF,
        "characters",
    ),
    Case(
        "careless",
        "In round 3 of the run `desk-small`, half of the rollouts of `address-2` change the address without making "
        "sure who asks. Why these and not the others?",
        _CARELESS,
        "success_with",
    ),
    Case(
        "again_and_again",
        "One rollout of the run `desk` repeats itself until a limit stops it. What are its task and its round, and "
        "what does it repeat?",
        _AGAIN_AND_AGAIN,
        "calls",
    ),
    Case(
        "undone",
        "In round 9 of the run `desk`, one rollout of `address-1` fails although its last message reads like that of "
        "the others. What went wrong, and at which step?",
        _UNDONE,
        None,
    ),
    Case(
        "out_of_hand",
        "The training of the run `desk` got out of hand: from one update on the policy hardly tries anything new. From "
        "which update on, and what was changed there?",
        _OUT_OF_HAND,
        "fall",
    ),
)
