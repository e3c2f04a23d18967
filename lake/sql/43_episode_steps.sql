-- episode_steps: what the steps of an episode come to.
-- Grain: one row per episode that has steps.
-- Columns: those of `episodes`, and these:
--   steps: Number of steps.
--   tools_called: Names of the tools that its steps call, each once, in alphabetical order.
--   tools_failed: Likewise, of the calls after which the state is an error text; of a step with several calls that
--       tells of the last.
--   invalid_actions: Steps whose action was malformed.
--   error_states: Steps whose state is an error text.
--   active_steps: Steps that are active.
--   judged_actions: Active steps of which it is known whether the action is valid.
--   active_invalid: Active steps whose action was malformed.
--   judged_states: Active steps of which it is known whether the state is an error text.
--   active_errors: Active steps whose state is an error text.
CREATE VIEW episode_steps AS
WITH failed AS (
    SELECT
        s.episode_id,
        list_sort(list_distinct(list(
            coalesce(
                json_extract_string(s.tool_calls, '$[#-1].function.name'),
                json_extract_string(s.tool_calls, '$[#-1].name')
            )
        ))) AS tools
    FROM steps AS s
    JOIN steps AS n ON n.episode_id = s.episode_id AND n.step_index = s.step_index + 1
    WHERE s.tool_calls <> '[]' AND n.state_is_error
    GROUP BY s.episode_id
)

SELECT
    s.episode_id,
    s.run_id,
    count(*)::INTEGER AS steps,
    coalesce(
        list_sort(list_distinct(flatten(
            list(
                list_concat(
                    json_extract_string(tool_calls, '$[*].name'), json_extract_string(tool_calls, '$[*].function.name')
                )
            ) FILTER (tool_calls <> '[]')
        ))),
        []
    ) AS tools_called,
    coalesce(any_value(f.tools), []) AS tools_failed,
    (count(*) FILTER (NOT is_action_valid))::INTEGER AS invalid_actions,
    (count(*) FILTER (state_is_error))::INTEGER AS error_states,
    (count(*) FILTER (is_active))::INTEGER AS active_steps,
    (count(is_action_valid) FILTER (is_active))::INTEGER AS judged_actions,
    (count(*) FILTER (is_active AND NOT is_action_valid))::INTEGER AS active_invalid,
    (count(state_is_error) FILTER (is_active))::INTEGER AS judged_states,
    (count(*) FILTER (is_active AND state_is_error))::INTEGER AS active_errors
FROM steps AS s
LEFT JOIN failed AS f ON f.episode_id = s.episode_id
GROUP BY s.episode_id, s.run_id;
