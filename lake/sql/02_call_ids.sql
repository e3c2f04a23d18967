-- without_call_ids(tool_calls): tool calls without their ids (`id`, `call_id`), which a server draws at random: with them
-- every call differs from every other. An id among the arguments stays. What is no JSON list of calls stays as it is.
-- By RFC 7396 null takes a member out. pipelines.credit.health has the same rule for frames.
CREATE MACRO without_call_ids(tool_calls) AS (
    if(
        json_valid(tool_calls) AND json_type(tool_calls) = 'ARRAY',
        list_transform(
            json_extract(tool_calls, '$[*]'),
            lambda x : if(json_type(x) = 'OBJECT', json_merge_patch(x, '{"id": null, "call_id": null}'), x)
        )::VARCHAR,
        tool_calls
    )
);
