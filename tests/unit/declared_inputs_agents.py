"""Inputs of coding agents' declared formats."""

import json
from typing import Any

from testkit.declared import DeclaredInput, lines

SESSION = "6f9619ff-8b86-4d01-b42d-00cf4fc964ff"
OTHER = "6f9619ff-8b86-4d01-b42d-00cf4fc964aa"


def amp() -> DeclaredInput:
    thread = {
        "v": 3,
        "id": "T-aa01",
        "created": 1767225600000,
        "title": "sums",
        "messages": [
            {"role": "user", "messageId": 0, "content": [{"type": "text", "text": "Add the numbers."}]},
            {
                "role": "assistant",
                "messageId": 1,
                "content": [
                    {"type": "thinking", "thinking": "Look first.", "signature": "s"},
                    {"type": "text", "text": "Reading."},
                    {"type": "tool_use", "id": "u1", "name": "Bash", "input": {"cmd": "cat n"}},
                    {"type": "tool_use", "id": "u2", "name": "Read", "input": {"path": "m"}},
                ],
                "state": {"type": "complete", "stopReason": "tool_use"},
                "usage": {"model": "m-1", "inputTokens": 2, "cacheReadInputTokens": 5, "outputTokens": 3},
            },
            {
                "role": "user",
                "messageId": 2,
                "content": [
                    {
                        "type": "tool_result",
                        "toolUseID": "u1",
                        "run": {"status": "done", "result": {"output": "2 3", "exitCode": 0}},
                    },
                    {
                        "type": "tool_result",
                        "toolUseID": "u2",
                        "run": {"status": "error", "error": {"message": "no file m"}},
                    },
                ],
            },
            {
                "role": "assistant",
                "messageId": 3,
                "content": [{"type": "text", "text": "5"}],
                "state": {"type": "complete", "stopReason": "end_turn"},
            },
        ],
    }
    calls = [("Bash", {"cmd": "cat n"}, "u1"), ("Read", {"path": "m"}, "u2")]
    first = {"saw": "Add the numbers.", "thought": "Look first.", "said": "Reading.", "calls": calls, "model": "m-1"}
    return DeclaredInput(
        "amp",
        "threads/T-aa01.json",
        json.dumps(thread, indent=1),
        [
            {
                "status": "completed",
                "steps": [
                    first | {"tokens": (7, 3), "finish": "tool_use"},
                    {"saw": "2 3\nno file m", "saw_error": True, "said": "5", "finish": "end_turn"},
                ],
            }
        ],
        sibling=('"T-aa01"', '"T-aa02"'),
        unknown=('"messages": [', '"messages": [{"role": "bird", "content": []}, '),
        cut=40,
    )


def trae_agent() -> DeclaredInput:
    def answer(content: str, calls: list[Any] | None, finish: str) -> dict[str, Any]:
        usage = {"input_tokens": 4, "output_tokens": 2, "cache_read_input_tokens": 6}
        return {"content": content, "model": "m-1", "finish_reason": finish, "usage": usage, "tool_calls": calls}

    call = {"call_id": "u1", "name": "bash", "arguments": {"command": "ls"}}
    last = {"call_id": "u2", "name": "task_done", "arguments": {}}
    failed = {"call_id": "u1", "success": False, "result": None, "error": "no folder"}
    done = {"call_id": "u2", "success": True, "result": "ended", "error": None}
    first, second = answer("I look.", [call], "tool_use"), answer("Nothing there.", [last], "tool_use")
    run = {
        "task": "List the files.",
        "start_time": "2026-01-02T03:04:05.000001",
        "end_time": "2026-01-02T03:05:05",
        "provider": "anthropic",
        "model": "m-1",
        "max_steps": 9,
        "llm_interactions": [
            {
                "timestamp": "2026-01-02T03:04:06",
                "provider": "anthropic",
                "model": "m-1",
                "input_messages": [
                    {"role": "system", "content": "You are an agent."},
                    {"role": "user", "content": "In /w: List the files."},
                ],
                "response": first,
                "tools_available": ["bash"],
            },
            {
                "timestamp": "2026-01-02T03:04:16",
                "provider": "anthropic",
                "model": "m-1",
                "input_messages": [
                    {"role": "user", "content": None, "tool_result": failed},
                    {"role": "assistant", "content": "Try another way."},
                ],
                "response": second,
                "tools_available": ["bash"],
            },
        ],
        "agent_steps": [
            {"step_number": 1, "state": "completed", "llm_response": first, "tool_results": [failed], "error": None},
            {"step_number": 2, "state": "completed", "llm_response": second, "tool_results": [done], "error": None},
        ],
        "success": True,
        "final_result": "Nothing there.",
        "execution_time": 60.0,
    }
    common = {"model": "m-1", "tokens": (10, 2), "finish": "tool_use"}
    return DeclaredInput(
        "trae_agent",
        "trajectories/trajectory_1.json",
        json.dumps(run, indent=1),
        [
            {
                "status": "completed",
                "steps": [
                    common
                    | {
                        "saw": "In /w: List the files.",
                        "said": "I look.",
                        "calls": [("bash", {"command": "ls"}, "u1")],
                    },
                    # The reflection is the agent program's.
                    common
                    | {
                        "saw": "no folder\nTry another way.",
                        "said": "Nothing there.",
                        "calls": [("task_done", {}, "u2")],
                    },
                ],
                "after": [("tool", "ended")],
            }
        ],
        sibling=("03:04:05.000001", "03:04:05.000002"),
        unknown=('"llm_interactions": [', '"llm_interactions": [{"bird": 1}, '),
        cut=60,
    )


def gemini_cli() -> DeclaredInput:
    def turn(name: str, *, tokens: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        base = {
            "id": name,
            "timestamp": f"2026-01-02T03:04:0{name[-1]}Z",
            "type": "gemini",
            "content": "",
            "model": "g",
        }
        return base | ({"tokens": tokens} if tokens else {}) | fields

    def user(name: str, content: Any) -> dict[str, Any]:
        return {"id": name, "timestamp": f"2026-01-02T03:04:0{name[-1]}Z", "type": "user", "content": content}

    response = {"functionResponse": {"id": "c1", "name": "ls", "response": {"output": "a.py"}}}
    tokens = {"input": 10, "output": 4, "cached": 2, "thoughts": 3, "tool": 0, "total": 17}
    thoughts = [{"subject": "Plan", "description": "Look.", "timestamp": "2026-01-02T03:04:02Z"}]
    call = {"id": "c1", "name": "ls", "args": {"dir": "."}, "status": "executing", "timestamp": "2026-01-02T03:04:02Z"}
    summary = [user("s5", [{"text": "So far: one file."}]), turn("a6", model=None, content=[{"text": "Understood."}])]
    answer = turn("g3", content=[{"text": "One file."}])
    text = lines(
        {"sessionId": SESSION, "projectHash": "p", "startTime": "2026-01-02T03:04:00Z", "kind": "main"},
        user("u1", [{"text": "What is here?"}]),
        {"$set": {"lastUpdated": "2026-01-02T03:04:01Z"}},
        turn("g2", thoughts=thoughts),
        turn("g2", thoughts=thoughts, tokens=tokens, toolCalls=[call]),
        turn("g2", thoughts=thoughts, tokens=tokens, toolCalls=[call | {"status": "success", "result": [response]}]),
        answer,
        user("u4", "Delete it."),
        turn("g5", content="Deleted."),
        {"$rewindTo": "u4"},
        # Compression: a summary, and what is kept.
        {"$set": {"messages": [*summary, user("f4", [response]), answer]}},
        user("u7", "Thanks."),
        {"id": "i8", "timestamp": "2026-01-02T03:04:08Z", "type": "info", "content": "Saved."},
        turn("g9", content="Bye.", tokens=tokens),
    )
    first = {
        "saw": "What is here?",
        "thought": "Plan: Look.",
        "calls": [("ls", {"dir": "."}, "c1")],
        "model": "g",
        "tokens": (10, 7),
    }
    second = {"saw": "a.py", "said": "One file.", "model": "g"}
    last = {"saw": "So far: one file.\nUnderstood.\nThanks.", "said": "Bye.", "model": "g", "tokens": (10, 7)}
    undone = {"saw": "Delete it.", "said": "Deleted.", "model": "g"}
    return DeclaredInput(
        "gemini_cli",
        f"tmp/shop/chats/session-2026-01-02T03-04-{SESSION[:8]}.jsonl",
        text,
        [
            {"status": "completed", "steps": [first, second, last]},
            {
                "status": "completed",
                "relation": "fork",
                "steps": [first | {"copied": True}, second | {"copied": True}, undone],
            },
        ],
        sibling=(f'"sessionId": "{SESSION}"', f'"sessionId": "{OTHER}"'),
        unknown=('"type": "info"', '"type": "bird"'),
        cut=5,
    )


def gemini_cli_document() -> DeclaredInput:
    picture = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    failed = {"functionResponse": {"id": "c1", "name": "read", "response": {"error": "no such file"}}}
    chat = {
        "sessionId": SESSION,
        "projectHash": "p",
        "startTime": "2026-01-02T03:04:00Z",
        "lastUpdated": "2026-01-02T03:04:09Z",
        "messages": [
            {"id": "u1", "timestamp": "2026-01-02T03:04:00Z", "type": "user", "content": [{"text": "See."}, picture]},
            {
                "id": "g2",
                "timestamp": "2026-01-02T03:04:02Z",
                "type": "gemini",
                "content": "I read.",
                "model": "g",
                "toolCalls": [{"id": "c1", "name": "read", "args": {}, "status": "error", "result": [failed]}],
            },
        ],
    }
    return DeclaredInput(
        "gemini_cli",
        "tmp/shop/chats/session-1.json",
        json.dumps(chat, indent=1),
        [
            {
                "status": "completed",
                "steps": [{"saw": "See.", "said": "I read.", "calls": [("read", {}, "c1")], "model": "g"}],
                "after": [("tool", "no such file")],
            }
        ],
        sibling=(SESSION, OTHER),
        unknown=('"messages": [', '"messages": [{"id": "b", "type": "bird"}, '),
        cut=30,
    )


def pi() -> DeclaredInput:
    def entry(name: str, parent: str | None, message: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        base = {"type": "message", "id": name, "parentId": parent, "timestamp": "2026-01-02T03:04:05.000Z"}
        return base | ({"message": message} if message else {}) | fields

    def said(*content: Any, stop: str = "stop") -> dict[str, Any]:
        usage = {"input": 4, "output": 2, "cacheRead": 6, "cacheWrite": 0, "cost": {"total": 0.5}}
        about = {"provider": "p", "model": "m-1", "usage": usage, "stopReason": stop, "timestamp": 1767323045000}
        return {"role": "assistant", "content": list(content), **about}

    def text(words: str) -> dict[str, Any]:
        return {"type": "text", "text": words}

    thought = {"type": "thinking", "thinking": "Look.", "thinkingSignature": "s"}
    call = {"type": "toolCall", "id": "c1", "name": "bash", "arguments": {"command": "ls"}}
    result = {
        "role": "toolResult",
        "toolCallId": "c1",
        "toolName": "bash",
        "content": [text("denied")],
        "isError": True,
    }
    command = {"role": "bashExecution", "command": "id", "output": "root", "exitCode": 0, "timestamp": 1767323046000}
    log = lines(
        {"type": "session", "version": 3, "id": SESSION, "timestamp": "2026-01-02T03:04:05Z", "cwd": "/w"},
        entry("e1", None, {"role": "user", "content": "What is here?", "timestamp": 1767323044000}),
        entry("e2", "e1", said(thought, text("I look."), call, stop="toolUse")),
        entry("e3", "e2", result),
        entry("x4", "e3", said(stop="error") | {"errorMessage": "overloaded"}),
        entry("e4", "e3", said(text("I may not."))),
        # The person goes back, and tries something else.
        entry("f1", "e1", {"role": "user", "content": "Go on.", "timestamp": 1767323046000}),
        entry("f2", "f1", said(text("Done."))),
        entry("b1", "f2", type="model_change", provider="p", modelId="m-2"),
        entry("f3", "b1", command),
        entry("k1", "f3", type="compaction", summary="It is done.", firstKeptEntryId="f2", tokensBefore=9),
        entry("f4", "k1", {"role": "user", "content": [text("And now?"), {"type": "image", "data": "AA"}]}),
        entry("f5", "f4", said(text("Rest."))),
    )
    common = {"model": "m-1", "tokens": (10, 2), "finish": "stop"}
    kept = "It is done.\nDone.\nRan `id`\n```\nroot\n```\nAnd now?"
    return DeclaredInput(
        "pi",
        f"sessions/--w--/2026-01-02T03-04-05-000Z_{SESSION}.jsonl",
        log,
        [
            {
                "status": "completed",
                "steps": [
                    common | {"saw": "What is here?\nGo on.", "said": "Done."},
                    common | {"saw": kept, "said": "Rest.", "history": "rewritten"},
                ],
            },
            {
                "status": "completed",
                "relation": "fork",
                "steps": [
                    common
                    | {"saw": "What is here?", "thought": "Look.", "said": "I look.", "finish": "toolUse"}
                    | {"calls": [("bash", {"command": "ls"}, "c1")]},
                    common | {"saw": "denied", "saw_error": True, "said": "I may not."},
                ],
            },
        ],
        sibling=(f'"id": "{SESSION}"', f'"id": "{OTHER}"'),
        unknown=('"type": "model_change"', '"type": "bird"'),
        cut=5,
    )


def copilot_cli() -> DeclaredInput:
    def event(number: int, kind: str, agent: str | None = None, **fields: Any) -> dict[str, Any]:
        base = {"type": kind, "data": fields, "id": f"e{number}", "timestamp": f"2026-01-02T03:04:{number:02}Z"}
        return base | {"parentId": f"e{number - 1}"} | ({"agentId": agent} if agent else {})

    request = {"toolCallId": "c1", "name": "task", "arguments": {"prompt": "Count."}, "type": "function"}
    inner = {"toolCallId": "c2", "name": "bash", "arguments": '{"command": "ls"}', "type": "function"}
    picture = {"type": "image", "data": "AA", "mimeType": "image/png"}
    piece = {"apiCallId": "api-2", "model": "m-1", "chunkCount": 2}
    text = lines(
        event(1, "session.start", sessionId=SESSION, version=1, copilotVersion="1.0.81", selectedModel="m-1"),
        event(2, "system.message", role="system", content="You are an agent."),
        event(3, "user.message", content="How many?", transformedContent="<now>3</now>How many?", attachments=[]),
        event(4, "assistant.turn_start", turnId="0"),
        event(
            5,
            "assistant.message",
            messageId="m1",
            content="I ask.",
            toolRequests=[request],
            outputTokens=4,
            model="m-1",
        )
        | {"parentId": "e4"},
        event(6, "subagent.started", agent="a0", toolCallId="c0", agentName="idle"),
        event(7, "user.message", agent="a1", content="Count."),
        event(8, "assistant.message", agent="a1", messageId="m2", content="", toolRequests=[inner], outputTokens=2),
        event(9, "tool.execution_complete", agent="a1", toolCallId="c2", success=False, error={"message": "denied"}),
        event(
            10, "assistant.message", agent="a1", messageId="m3", content="I cannot.", toolRequests=[], outputTokens=3
        ),
        event(
            11,
            "tool.execution_complete",
            toolCallId="c1",
            success=True,
            result={"content": "none", "binaryResultsForLlm": [picture]},
        ),
        # One response in two pieces, with reasoning between them.
        event(12, "assistant.message", messageId="m4", content="So ", chunkIndex=0, reasoningText="Hm.", **piece),
        event(13, "assistant.message", messageId="m5", content="none.", chunkIndex=1, outputTokens=5, **piece),
        event(14, "session.compaction_complete", success=True, summaryContent="Nothing was counted."),
        event(15, "user.message", content="Thanks."),
        event(16, "assistant.message", messageId="m6", content="Bye.", outputTokens=1, model="m-1"),
        event(17, "session.shutdown", shutdownType="routine", currentModel="m-1"),
    )
    return DeclaredInput(
        "copilot_cli",
        f"session-state/{SESSION}/events.jsonl",
        text,
        [
            {
                "status": "completed",
                "steps": [
                    {
                        "saw": "<now>3</now>How many?",
                        "said": "I ask.",
                        "calls": [("task", {"prompt": "Count."}, "c1")],
                        "model": "m-1",
                        "tokens": (None, 4),
                    },
                    {"saw": "none", "thought": "Hm.", "said": "So none.", "model": "m-1", "tokens": (None, 5)},
                    {
                        "saw": "Nothing was counted.\nThanks.",
                        "said": "Bye.",
                        "model": "m-1",
                        "tokens": (None, 1),
                        "history": "rewritten",
                    },
                ],
            },
            {
                "status": "completed",
                "relation": "subagent",
                "steps": [
                    {"saw": "Count.", "calls": [("bash", {"command": "ls"}, "c2")], "tokens": (None, 2)},
                    {"saw": "denied", "saw_error": True, "said": "I cannot.", "tokens": (None, 3)},
                ],
            },
        ],
        sibling=(f'"sessionId": "{SESSION}"', f'"sessionId": "{OTHER}"'),
        unknown=('"type": "assistant.turn_start"', '"type": "bird.song"'),
        cut=5,
    )


def cursor() -> DeclaredInput:
    def line(role: str, *parts: Any) -> dict[str, Any]:
        return {"role": role, "message": {"content": list(parts)}}

    asked = "<timestamp>Friday</timestamp>\n<user_query>\nWhat is here?\n</user_query>"
    call = {"type": "tool_use", "name": "Shell", "input": {"command": "ls"}}
    text = lines(
        line("user", {"type": "text", "text": asked}),
        line("assistant", {"type": "text", "text": "I look."}, call),
        line("assistant", {"type": "text", "text": "One file."}),
        {"type": "turn_ended", "status": "success"},
        line("user", {"type": "text", "text": "Go on."}),
        line("assistant", {"type": "text", "text": "Well"}),
        {"type": "turn_ended", "status": "aborted", "error": "by hand"},
    )
    return DeclaredInput(
        "cursor",
        f"projects/w/agent-transcripts/{SESSION}/{SESSION}.jsonl",
        text,
        [
            {
                "status": "aborted",
                "error": "by hand",
                "steps": [
                    {"saw": asked, "said": "I look.", "calls": [("Shell", {"command": "ls"}, None)]},
                    {"said": "One file."},
                    {"saw": "Go on.", "said": "Well"},
                ],
            }
        ],
        sibling=(SESSION, OTHER),
        unknown=('"status": "success"}\n', '"status": "success"}\n{"type": "bird"}\n'),
        cut=5,
    )


def kimi_cli() -> DeclaredInput:
    def line(second: float, kind: str, **payload: Any) -> dict[str, Any]:
        return {"timestamp": 1767323045.0 + second, "message": {"type": kind, "payload": payload}}

    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"type": "function", "id": name, "function": {"name": "Read", "arguments": arguments}, "extras": None}

    def result(name: str, output: str, message: str, *, is_error: bool) -> dict[str, Any]:
        returned = {"is_error": is_error, "output": output, "message": message, "display": []}
        return {"tool_call_id": name, "return_value": returned}

    usage = {"input_other": 4, "output": 2, "input_cache_read": 6, "input_cache_creation": 0}
    text = lines(
        {"type": "metadata", "protocol_version": "1.10"},
        line(0, "TurnBegin", user_input="Compare a and b."),
        line(1, "StepBegin", n=1),
        line(2, "ContentPart", type="think", think="Read ", encrypted=None),
        line(2, "ContentPart", type="think", think="both.", encrypted=None),
        line(3, "ContentPart", type="text", text="I read."),
        line(3, "ToolCall", **call("c1", '{"path": "a"}')),
        # Arguments arrive in pieces while an earlier call is already answered.
        line(4, "ToolCall", **call("c2", '{"path"')),
        line(4, "ToolResult", **result("c1", "1\n", "1 line.", is_error=False)),
        line(4, "ToolCallPart", arguments_part=': "b"}'),
        line(5, "StatusUpdate", token_usage=usage, message_id="r-1"),
        line(5, "ToolResult", **result("c2", "", "no file", is_error=True)),
        line(6, "StepBegin", n=2),
        line(7, "ContentPart", type="text", text="b is missing."),
        line(8, "StatusUpdate", token_usage=usage, message_id="r-2"),
        line(9, "StepBegin", n=3),
        line(9, "CompactionBegin"),
        line(11, "CompactionEnd"),
        line(12, "ContentPart", type="text", text="So they differ."),
        line(13, "StatusUpdate", token_usage=usage, message_id="r-3"),
        line(14, "TurnEnd"),
    )
    return DeclaredInput(
        "kimi_cli",
        f"sessions/0123456789abcdef0123456789abcdef/{SESSION}/wire.jsonl",
        text,
        [
            {
                "status": "completed",
                "steps": [
                    {
                        "saw": "Compare a and b.",
                        "thought": "Read both.",
                        "said": "I read.",
                        "calls": [("Read", {"path": "a"}, "c1"), ("Read", {"path": "b"}, "c2")],
                        "tokens": (10, 2),
                    },
                    {
                        "saw": "<system>1 line.</system>\n1\n\n<system>ERROR: no file</system>",
                        "saw_error": True,
                        "said": "b is missing.",
                        "tokens": (10, 2),
                    },
                    # The summary that the model saw is not in the file.
                    {"said": "So they differ.", "tokens": (10, 2), "history": "rewritten"},
                ],
            }
        ],
        sibling=(SESSION, OTHER),
        unknown=('"type": "TurnEnd"', '"type": "Bird"'),
        cut=5,
    )


def kimi_code() -> DeclaredInput:
    def line(second: int, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, **fields, "time": 1767323045000 + 1000 * second}

    def event(second: int, kind: str, **fields: Any) -> dict[str, Any]:
        return line(second, "context.append_loop_event", event={"type": kind, **fields})

    def user(second: int, words: str) -> dict[str, Any]:
        content = [{"type": "text", "text": words}]
        message = {"role": "user", "content": content, "toolCalls": [], "origin": {"kind": "user"}}
        return line(second, "context.append_message", message=message)

    usage = {"inputOther": 4, "output": 2, "inputCacheRead": 6, "inputCacheCreation": 0}
    tool = {"name": "Bash", "description": "run", "parameters": {}}
    text = lines(
        {"type": "metadata", "protocol_version": "1.4", "created_at": 1767323045000},
        line(0, "config.update", systemPrompt="You are an agent.", modelAlias="m"),
        line(0, "turn.prompt", input=[{"type": "text", "text": "What is here?"}], origin={"kind": "user"}),
        user(0, "What is here?"),
        event(1, "step.begin", uuid="s1", turnId="0", step=1),
        line(1, "llm.tools_snapshot", hash="h", tools=[tool]),
        line(1, "llm.request", model="m-1"),
        event(2, "content.part", part={"type": "think", "think": "Look."}, stepUuid="s1"),
        event(2, "tool.call", toolCallId="c1", name="Bash", args={"command": "ls"}, stepUuid="s1"),
        event(3, "tool.result", toolCallId="c1", result={"output": "denied", "isError": True}),
        event(3, "step.end", uuid="s1", usage=usage, finishReason="tool_use"),
        line(3, "usage.record", model="m", usage=usage),
        line(4, "context.apply_compaction", summary="Short.", contextSummary="So far: Short.", compactedCount=2),
        user(5, "Go on."),
        event(6, "step.begin", uuid="s2", turnId="1", step=1),
        event(7, "content.part", part={"type": "text", "text": "I may not."}, stepUuid="s2"),
        event(8, "step.end", uuid="s2", usage=usage, finishReason="end_turn"),
    )
    return DeclaredInput(
        "kimi_code",
        f"sessions/wd_w/session_{SESSION}/agents/main/wire.jsonl",
        text,
        [
            {
                "status": "completed",
                "steps": [
                    {
                        "saw": "What is here?",
                        "thought": "Look.",
                        "calls": [("Bash", {"command": "ls"}, "c1")],
                        "model": "m-1",
                        "tokens": (10, 2),
                        "finish": "tool_use",
                    },
                    {
                        "saw": "So far: Short.\nGo on.",
                        "said": "I may not.",
                        "tokens": (10, 2),
                        "finish": "end_turn",
                        "history": "rewritten",
                    },
                ],
            }
        ],
        sibling=('"created_at": 1767323045000', '"created_at": 1767323045001'),
        unknown=('"type": "usage.record"', '"type": "context.undo"'),
        cut=5,
    )


INPUTS = [
    amp(),
    trae_agent(),
    gemini_cli(),
    gemini_cli_document(),
    pi(),
    copilot_cli(),
    cursor(),
    kimi_cli(),
    kimi_code(),
]
