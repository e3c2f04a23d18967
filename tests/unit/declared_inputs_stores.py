"""Inputs of declared formats: tools that keep sessions in folders and databases, and agent frameworks."""

import json
from typing import Any

from testkit.declared import DeclaredInput, dump, lines

Object = dict[str, Any]

# ---------------------------------------------------------------- opencode

IMAGE = "data:image/png;base64,AAAA"
ZERO = {"input": 0, "output": 0, "reasoning": 0, "cache": {"read": 0, "write": 0}}
TOKENS = {"input": 2, "output": 3, "reasoning": 1, "cache": {"read": 5, "write": 0}}
SESSION = {"directory": "/w/shop", "title": "sums", "version": "1.2.0"}
OPENCODE_KEYS: list[tuple[str | None, ...]] = [("shop", "ses_2", None, "ses_1")]


def opencode_messages() -> list[Object]:
    def part(kind: str, **fields: Any) -> Object:
        return {"type": kind, **fields}

    def message(number: int, role: str, parts: list[Object], **fields: Any) -> Object:
        time = {"created": 1767225600000 + number * 1000, "completed": 1767225600500 + number * 1000}
        model = {"modelID": "m-1", "providerID": "p", "cost": 0.5, "tokens": TOKENS} if role == "assistant" else {}
        name = f"msg_{number}"
        numbered = [
            {"id": f"prt_{number}_{index}", "messageID": name, "sessionID": "ses_2"} | p
            for index, p in enumerate(parts)
        ]
        about = {"id": name, "sessionID": "ses_2", "role": role, "time": time}
        return {**about, **model, **fields, "parts": numbered}

    def finish(read: int, reason: str) -> Object:
        return part("step-finish", reason=reason, cost=0.25, tokens=ZERO | {"input": read, "output": 1})

    done = {"status": "completed", "input": {"cmd": "ls"}, "output": "n", "title": "", "metadata": {"exit": 0}}
    failed = {"status": "error", "input": {"path": "m"}, "error": "no file m"}
    pending = {"status": "running", "input": {"path": "x"}}
    start = part("step-start", snapshot="s")
    return [
        message(1, "user", [part("text", text="Add."), part("file", mime="image/png", url=IMAGE, filename="n.png")]),
        message(
            2,
            "assistant",
            [
                start,
                part("reasoning", text="Look first."),
                part("text", text="Reading."),
                part("tool", callID="c1", tool="bash", state=done),
                part("tool", callID="c2", tool="read", state=failed),
                finish(2, "tool-calls"),
            ],
            finish="tool-calls",
        ),
        # A message of an older version: two calls of the model.
        message(
            3,
            "assistant",
            [
                start,
                part("tool", callID="c3", tool="bash", state=done),
                finish(7, "tool-calls"),
                start,
                part("text", text="5"),
                finish(8, "stop"),
            ],
        ),
        message(4, "assistant", [start], error={"name": "APIError", "data": {"message": "busy"}}),
        message(5, "user", [part("compaction", auto=True)]),
        message(6, "assistant", [start, part("text", text="We added.")], summary=True),
        message(7, "user", [part("text", text="And 1?")]),
        message(8, "assistant", [start, part("text", text="6"), part("tool", callID="c4", tool="read", state=pending)]),
        message(9, "assistant", [], error={"name": "MessageAbortedError", "data": {"message": "stopped"}}),
    ]


def opencode_episodes() -> list[Object]:
    calls = [("bash", {"cmd": "ls"}, "c1"), ("read", {"path": "m"}, "c2")]
    first = {"saw": "Add.", "thought": "Look first.", "said": "Reading.", "calls": calls}
    model: Object = {"model": "m-1", "tokens": (7, 4)}
    last = {"saw": "We added.\nAnd 1?", "said": "6", "calls": [("read", {"path": "x"}, "c4")], "history": "rewritten"}
    return [
        {
            "status": "aborted",
            "relation": "subagent",
            "error": "stopped",
            "steps": [
                first | model | {"finish": "tool-calls"},
                {
                    **{"saw": "n\nno file m", "saw_error": True, "calls": [("bash", {"cmd": "ls"}, "c3")]},
                    **{"model": "m-1", "tokens": (7, 1), "finish": "tool-calls"},
                },
                {"saw": "n", "said": "5", "model": "m-1", "tokens": (8, 1), "finish": "stop"},
                last | model,
            ],
        }
    ]


def opencode_export() -> DeclaredInput:
    messages = [
        {"info": {key: field for key, field in m.items() if key != "parts"}, "parts": m["parts"]}
        for m in opencode_messages()
    ]
    info = {"id": "ses_2", "parentID": "ses_1", "time": {"created": 1767225600000, "updated": 1767225609000}} | SESSION
    text = json.dumps({"info": info, "messages": messages}, indent=1)
    unknown = ('"messages": [', '"messages": [{"info": {"role": "bird"}, "parts": []},')
    return DeclaredInput("opencode", "s.json", text, opencode_episodes(), unknown=unknown, cut=300, keys=OPENCODE_KEYS)


def opencode_storage() -> DeclaredInput:
    session = {"id": "ses_2", "parentID": "ses_1", "time": {"created": 1, "updated": 2}} | SESSION
    beside = {}
    for message in opencode_messages():
        parts = message.pop("parts")
        beside[f"storage/message/ses_2/{message['id']}.json"] = json.dumps(message)
        beside |= {f"storage/part/{message['id']}/{part['id']}.json": json.dumps(part) for part in parts}
    file = "storage/session/project/ses_2.json"
    return DeclaredInput("opencode", file, json.dumps(session), opencode_episodes(), beside=beside, keys=OPENCODE_KEYS)


def opencode_database() -> DeclaredInput:
    parts, messages = [], []
    for message in opencode_messages():
        for part in message.pop("parts"):
            parts.append({"id": part.pop("id"), "message_id": part.pop("messageID"), "data": part})
        name = message.pop("id")
        time = message["time"]["created"]
        messages.append({"id": name, "session_id": "ses_2", "time_created": time, "data": message})
    times = {"time_created": 1767225600000, "time_updated": 1767225609000}
    empty = {"id": "ses_3", "parent_id": None} | SESSION | times
    tables = {
        "project": [{"id": "p"}],
        "session": [{"id": "ses_2", "parent_id": "ses_1"} | SESSION | times, empty],
        "message": messages[::-1],
        "part": parts[::-1],
    }
    return DeclaredInput("opencode", "opencode.db", dump(tables), opencode_episodes(), keys=OPENCODE_KEYS)


# ---------------------------------------------------------------- goose


def goose_messages() -> list[Object]:
    def message(role: str, *content: Object, user: bool = True, agent: bool = True) -> Object:
        visible = {"userVisible": user, "agentVisible": agent}
        return {"role": role, "created": 1767225600, "content": list(content), "metadata": visible}

    def text(words: str, *audience: str) -> Object:
        return {"type": "text", "text": words} | ({"annotations": {"audience": list(audience)}} if audience else {})

    call = {"status": "success", "value": {"name": "shell", "arguments": {"command": "ls"}}}
    bad = {"status": "error", "error": "no such tool"}
    results = [text("n", "assistant"), text("n, in colours", "user")]
    return [
        message("user", text("Add."), agent=False),
        message(
            "assistant",
            {"type": "thinking", "thinking": "Look first.", "signature": "s"},
            text("Reading."),
            {"type": "toolRequest", "id": "c1", "toolCall": call},
            {"type": "toolRequest", "id": "c2", "toolCall": call},
            agent=False,
        ),
        message(
            "user",
            {"type": "toolResponse", "id": "c1", "toolResult": {"status": "success", "value": results}},
            {"type": "toolResponse", "id": "c2", "toolResult": bad},
            agent=False,
        ),
        message("assistant", {"type": "systemNotification", "notificationType": "inlineMessage", "msg": "compacting"}),
        message("user", text("Two numbers were read."), user=False),
        message("assistant", text("I go on."), user=False),
        message("assistant", text("5")),
    ]


def goose_episodes(**facts: Any) -> list[Object]:
    calls = [("shell", {"command": "ls"}, "c1"), ("shell", {"command": "ls"}, "c2")]
    return [
        {
            "status": "completed",
            **facts,
            "steps": [
                {"saw": "Add.", "thought": "Look first.", "said": "Reading.", "calls": calls},
                {"saw": "Two numbers were read.", "said": "I go on.", "untrained": True, "history": "rewritten"},
                {"said": "5"},
            ],
        }
    ]


def goose_lines() -> DeclaredInput:
    about = {"working_dir": "/w/shop", "description": "sums", "message_count": 7, "accumulated_input_tokens": 9}
    text = lines(about, *goose_messages())
    unknown = ('{"working_dir', '{"role": "bird", "created": 1, "content": [{"type": "text"}]}\n{"working_dir')
    keys: list[tuple[str | None, ...]] = [("shop", "20260101_1", None, None)]
    return DeclaredInput("goose", "20260101_1.jsonl", text, goose_episodes(), unknown=unknown, cut=9, keys=keys)


def goose_export() -> DeclaredInput:
    session: Object = {
        "id": "20260101_2",
        "working_dir": "/w/shop",
        "name": "sums",
        "created_at": "2026-01-01T00:00:00Z",
    }
    session |= {"parent_session_id": "20260101_1", "model_config": {"model_name": "m-1"}, "accumulated_cost": 0.5}
    text = json.dumps(session | {"conversation": goose_messages()}, indent=1)
    keys: list[tuple[str | None, ...]] = [("shop", "20260101_2", None, "20260101_1")]
    return DeclaredInput("goose", "s.json", text, goose_episodes(relation="subagent"), keys=keys)


def goose_database() -> DeclaredInput:
    sessions = [
        {
            **{"id": "20260101_2", "working_dir": "/w/shop", "parent_session_id": "20260101_1"},
            **{"created_at": "2026-01-01 00:00:00", "updated_at": "2026-01-01 00:01:00"},
            **{"accumulated_input_tokens": 9, "accumulated_output_tokens": 4, "accumulated_cost": 0.5},
            "model_config_json": {"model_name": "m-1"},
        }
    ]
    messages = [
        {
            **{"id": index, "message_id": f"m{index}", "session_id": "20260101_2", "role": message["role"]},
            **{"content_json": message["content"], "created_timestamp": message["created"]},
            "metadata_json": message["metadata"],
        }
        for index, message in enumerate(goose_messages())
    ]
    text = dump({"schema_version": [{"version": 17}], "sessions": sessions, "messages": messages})
    keys: list[tuple[str | None, ...]] = [("shop", "20260101_2", None, "20260101_1")]
    return DeclaredInput("goose", "sessions.db", text, goose_episodes(relation="subagent"), keys=keys)


# ---------------------------------------------------------------- Cline, Roo Code, aider


def cline() -> DeclaredInput:
    usage = {"tokens": {"prompt": 2, "completion": 3, "cached": 5}, "cost": 0.5}
    call = {"type": "tool_use", "id": "u1", "name": "read_file", "input": {"path": "n"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    entries: list[Object] = [
        {"role": "user", "content": [{"type": "text", "text": "<task>Add.</task>"}, image], "ts": 1767225600000},
        {
            **{"role": "assistant", "id": "gen-1", "ts": 1767225601000},
            "content": [{"type": "thinking", "thinking": "Look first."}, {"type": "text", "text": "Reading."}, call],
            "modelInfo": {"modelId": "m-1", "providerId": "p", "mode": "act"},
            "metrics": usage,
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "u1", "content": "no file", "is_error": True}],
        },
        {"role": "assistant", "content": "5", "id": "gen-2", "ts": 1767225602000, "condenseParent": "x"},
        {"role": "user", "content": [{"type": "text", "text": "We added."}], "isSummary": True, "condenseId": "x"},
        {"role": "assistant", "content": [{"type": "text", "text": "6"}], "id": "gen-3"},
    ]
    shown = [{"ts": 1, "type": "say", "say": "api_req_started", "text": json.dumps({"tokensIn": 2, "cost": 0.75})}]
    item = {"id": "42", "parentTaskId": "41", "ts": 1, "task": "Add.", "tokensIn": 2, "tokensOut": 3}
    call_facts = [("read_file", {"path": "n"}, "u1")]
    first = {"saw": "<task>Add.</task>", "thought": "Look first.", "said": "Reading.", "calls": call_facts}
    return DeclaredInput(
        "cline",
        "roo/tasks/42/api_conversation_history.json",
        json.dumps(entries),
        [
            {
                "status": "completed",
                "relation": "subagent",
                "steps": [
                    first | {"model": "m-1", "tokens": (7, 3)},
                    {"saw": "no file", "saw_error": True, "said": "5"},
                    {"saw": "We added.", "said": "6", "history": "rewritten"},
                ],
            }
        ],
        unknown=('[{"role"', '[{"role": "bird"}, {"role"'),
        cut=9,
        beside={
            "roo/tasks/42/ui_messages.json": json.dumps(shown),
            "roo/tasks/42/history_item.json": json.dumps(item),
        },
        keys=[(None, "42", None, "41")],
    )


def cline_session() -> DeclaredInput:
    call = {"type": "tool_use", "id": "u1", "name": "editor", "input": {"path": "n"}}
    messages: list[Object] = [
        {"id": "a", "role": "user", "content": [{"type": "text", "text": "Add."}]},
        {
            **{"id": "b", "role": "assistant", "ts": 1767225600000, "modelInfo": {"id": "m-1", "provider": "p"}},
            "content": [{"type": "thinking", "thinking": "Look first."}, call],
            "metrics": {"inputTokens": 7, "outputTokens": 3, "cacheReadTokens": 5, "cacheWriteTokens": 0, "cost": 0.5},
        },
        {
            **{"id": "c", "role": "user"},
            "content": [{"type": "tool_result", "tool_use_id": "u1", "content": [{"query": "n", "result": "2 3"}]}],
        },
        {"id": "d", "role": "assistant", "content": [{"type": "text", "text": "5"}], "modelInfo": {"id": "m-1"}},
    ]
    about = {"version": 1, "updated_at": "2026-01-01T00:00:00Z", "agent": "lead", "sessionId": "s-1"}
    steps: list[Object] = [
        {
            **{"saw": "Add.", "thought": "Look first.", "calls": [("editor", {"path": "n"}, "u1")]},
            **{"model": "m-1", "tokens": (7, 3)},
        },
        {"saw": '[{"query":"n","result":"2 3"}]', "said": "5", "model": "m-1"},
    ]
    return DeclaredInput(
        "cline_session",
        "sessions/s-1/s-1.messages.json",
        json.dumps(about | {"messages": messages, "system_prompt": "You add."}, indent=1),
        [{"status": "completed", "steps": steps}],
        unknown=('"messages": [', '"messages": [{"role": "bird"},'),
        cut=60,
        keys=[(None, "s-1", None, None)],
    )


AIDER = """
# aider chat started at 2026-01-02 03:04:05

> Aider v0.86.1  \n> Main model: m-1 with diff edit format  \n>  \n
#### Add the numbers  \n#### in n.  \n
<thinking-content-7bb>
Look first.
</thinking-content-7bb>

#### The sum
> is
5

> Tokens: 9 sent, 4 received.  \n
#### /clear  \n> All chat history cleared.  \n
#### And 1?  \n
6

# aider chat started at 2026-01-03 03:04:05

#### Add the numbers  \n#### in n.  \n
five
"""


def aider() -> DeclaredInput:
    question = "Add the numbers\nin n."
    steps: list[Object] = [
        {"saw": question, "thought": "Look first.", "said": "#### The sum\n> is\n5"},
        {"saw": "And 1?", "said": "6", "history": "rewritten"},
    ]
    again = {"status": "completed", "steps": [{"saw": question, "said": "five"}]}
    return DeclaredInput(
        "aider",
        "shop/.aider.chat.history.md",
        AIDER,
        [{"status": "completed", "steps": steps}, again],
        sibling=("2026-01-02 03:04:05", "2026-01-02 03:04:06"),
    )


# ---------------------------------------------------------------- frameworks


def smolagents_steps() -> tuple[list[Object], list[Object]]:
    usage = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}, "description": None}}
    prompt = [{"role": "system", "content": [{"type": "text", "text": "You add."}]}]

    def step(number: int, said: str | None, calls: list[Object] | None = None, **fields: Any) -> Object:
        message = said and {"role": "assistant", "content": said, "tool_calls": calls, "raw": None}
        return {
            **{"step_number": number, "timing": {"start_time": 1767225600.0, "end_time": None, "duration": 2.0}},
            **{"model_input_messages": prompt, "tool_calls": [call], "model_output_message": message},
            **{"model_output": said, "token_usage": usage, "error": None, "observations": None},
            **{"action_output": None, "is_final_answer": False, **fields},
        }

    entries: list[Object] = [
        {"task": "Add.", "task_images": None},
        {
            "plan": "Read, then add.",
            "model_input_messages": prompt,
            "timing": {"start_time": 1.0},
            "token_usage": usage,
        },
        step(1, "Adding.", [call], observations="5"),
        step(2, "x = 1/0", error={"type": "AgentExecutionError", "message": "division by zero"}),
        step(3, "5"),
        step(4, None, error={"type": "AgentMaxStepsError", "message": "too many steps"}, action_output="5"),
    ]
    tokens = {"tokens": (7, 3)}
    steps: list[Object] = [
        {"saw": "Add.", "said": "Read, then add."} | tokens,
        {"said": "Adding.", "calls": [("add", {"a": 2}, "c1")]} | tokens,
        {"saw": "5", "said": "x = 1/0"} | tokens,
        {"saw": "division by zero", "saw_error": True, "said": "5"} | tokens,
    ]
    return entries, [{"status": "truncated", "error": "too many steps", "steps": steps}]


def smolagents_memory() -> DeclaredInput:
    entries, episodes = smolagents_steps()
    unknown = ('[{"task"', '[{"bird": 1}, {"task"')
    return DeclaredInput(
        "smolagents", "a/memory.json", json.dumps(entries), episodes, ("memory", "other"), unknown=unknown, cut=9
    )


def smolagents_run() -> DeclaredInput:
    entries, episodes = smolagents_steps()
    run = {"output": "5", "state": "max_steps_error", "steps": entries, "token_usage": None}
    text = json.dumps(run | {"timing": {"start_time": 1767225600.0, "end_time": 1767225609.0, "duration": 9.0}})
    return DeclaredInput("smolagents", "a/run.json", text, episodes)


def autogen_messages() -> tuple[list[Object], list[Object]]:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}

    def message(kind: str, source: str, content: Any, used: Object | None = None, **fields: Any) -> Object:
        return {"type": kind, "source": source, "content": content, "models_usage": used, "metadata": {}} | fields

    entries = [
        message("TextMessage", "user", "Add."),
        message("ThoughtEvent", "adder", "Look first."),
        message("ToolCallRequestEvent", "adder", [{"id": "c1", "name": "add", "arguments": '{"a": 2}'}], usage),
        message(
            "ToolCallExecutionEvent", "adder", [{"call_id": "c1", "name": "add", "content": "bad", "is_error": True}]
        ),
        message("TextMessage", "adder", "5", usage),
        message("TextMessage", "writer", "It is 5.", usage),
        message("StopMessage", "adder", "Done."),
    ]
    tokens = {"tokens": (7, 3)}
    adder: list[Object] = [
        {"saw": "Add.", "calls": [("add", '{"a": 2}', "c1")]} | tokens,
        {"saw": "bad", "saw_error": True, "said": "5"} | tokens,
    ]
    writer = [{"saw": "Add.\n5", "said": "It is 5."} | tokens]
    return entries, [
        {"status": "completed", "steps": adder, "after": [("user", "It is 5."), ("user", "Done.")]},
        {"status": "completed", "steps": writer, "after": [("user", "Done.")]},
    ]


def autogen_list() -> DeclaredInput:
    entries, episodes = autogen_messages()
    keys: list[tuple[str | None, ...]] = [(None, None, "adder", None), (None, None, "writer", None)]
    return DeclaredInput(
        "autogen", "a/messages.json", json.dumps(entries), episodes, ("messages", "other"), cut=9, keys=keys
    )


def autogen_result() -> DeclaredInput:
    entries, episodes = autogen_messages()
    text = json.dumps({"messages": entries, "stop_reason": "enough"}, indent=1)
    return DeclaredInput("autogen", "a/run.json", text, episodes, ("run", "other"))


def autogen_state() -> DeclaredInput:
    contexts: dict[str, list[Object]] = {
        "adder": [
            {"type": "UserMessage", "source": "user", "content": "Add."},
            {
                **{"type": "AssistantMessage", "source": "adder", "thought": "Look first."},
                "content": [{"id": "c1", "name": "add", "arguments": "{}"}],
            },
            {
                "type": "FunctionExecutionResultMessage",
                "content": [{"call_id": "c1", "name": "add", "content": "5", "is_error": False}],
            },
            {"type": "AssistantMessage", "source": "adder", "thought": None, "content": "5"},
        ],
        "silent": [{"type": "UserMessage", "source": "user", "content": "Add."}],
    }
    states: Object = {
        name: {"agent_state": {"type": "AssistantAgentState", "llm_context": {"messages": messages}}}
        for name, messages in contexts.items()
    }
    states["manager"] = {"type": "RoundRobinManagerState", "message_thread": []}
    steps: list[Object] = [
        {"saw": "Add.", "thought": "Look first.", "calls": [("add", "{}", "c1")]},
        {"saw": "5", "said": "5"},
    ]
    return DeclaredInput(
        "autogen_state",
        "a/state.json",
        json.dumps({"type": "TeamState", "version": "1.0.0", "agent_states": states}),
        [{"status": "completed", "steps": steps}],
        ("state", "other"),
        unknown=('[{"type": "UserMessage", "source": "user", "content": "Add."}, {', '[{"type": "Bird"}, {'),
        keys=[(None, None, "adder", None)],
    )


def calls() -> list[tuple[list[Object], Object]]:
    """Return two calls of one agent: prompts and responses of the chat API."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    prompt: list[Object] = [{"role": "system", "content": "You add."}, {"role": "user", "content": "Add."}]
    asks: Object = {"role": "assistant", "content": None, "tool_calls": [call]}
    usage = {"prompt_tokens": 7, "completion_tokens": 3}

    def response(name: str, message: Object, reason: str) -> Object:
        return {"id": name, "model": "m-1", "usage": usage, "choices": [{"message": message, "finish_reason": reason}]}

    followed = [*prompt, asks, {"role": "tool", "tool_call_id": "c1", "content": "5"}]
    return [
        (prompt, response("r1", asks, "tool_calls")),
        (followed, response("r2", {"role": "assistant", "content": "5"}, "stop")),
    ]


CALL_STEPS: list[Object] = [
    {"saw": "Add.", "calls": [("add", '{"a": 2}', "c1")], "model": "m-1", "tokens": (7, 3), "finish": "tool_calls"},
    {"saw": "5", "said": "5", "model": "m-1", "tokens": (7, 3), "finish": "stop"},
]


def autogen_calls() -> DeclaredInput:
    events = [
        {
            **{"type": "LLMCall", "messages": prompt, "response": response, "agent_id": "adder/1"},
            **{"prompt_tokens": 7, "completion_tokens": 3},
        }
        for prompt, response in calls()
    ]
    events.insert(
        1, {"type": "ToolCall", "tool_name": "add", "arguments": {"a": 2}, "result": "5", "agent_id": "adder/1"}
    )
    keys: list[tuple[str | None, ...]] = [(None, None, "adder/1", None)]
    episodes = [{"status": "completed", "steps": CALL_STEPS}]
    return DeclaredInput("autogen_calls", "a/log.jsonl", lines(*events), episodes, ("log", "other"), cut=9, keys=keys)


def ag2() -> DeclaredInput:
    rows = [
        {
            **{"id": index, "session_id": "s-1", "wrapper_id": 4, "client_id": 5, "invocation_id": f"i{index}"},
            **{"request": {"messages": prompt, "model": "m-1"}, "response": response, "is_cached": 0, "cost": 0.5},
            **{"start_time": "2026-01-02 03:04:05", "end_time": "2026-01-02 03:04:06"},
        }
        for index, (prompt, response) in enumerate(calls())
    ]
    failed = rows[0] | {"id": 2, "response": {"response": "rate limit"}}
    tables = {
        "chat_completions": [*rows, failed],
        "agents": [{"id": 1, "session_id": "s-1", "wrapper_id": 4, "name": "adder"}],
        "oai_wrappers": [{"id": 1}],
        "oai_clients": [{"id": 1}],
    }
    episodes = [{"status": "completed", "steps": CALL_STEPS}]
    return DeclaredInput("ag2", "logs.db", dump(tables), episodes, keys=[(None, None, "adder", None)])


def crewai() -> DeclaredInput:
    entry = {"timestamp": "2026-01-02 03:04:05", "task_name": "sum", "task": "Add.", "agent": "Adder"}
    entries = [entry | {"status": "started"}, entry | {"status": "completed", "output": "5"}]
    steps: list[Object] = [{"saw": "Add.", "said": "5", "untrained": True}]
    episodes = [{"status": "completed", "steps": steps}]
    return DeclaredInput("crewai", "logs.json", json.dumps(entries), episodes, keys=[(None, None, "Adder", None)])


INPUTS = [
    opencode_export(),
    opencode_storage(),
    opencode_database(),
    goose_lines(),
    goose_export(),
    goose_database(),
    cline(),
    cline_session(),
    aider(),
    smolagents_memory(),
    smolagents_run(),
    autogen_list(),
    autogen_result(),
    autogen_state(),
    autogen_calls(),
    ag2(),
    crewai(),
]
