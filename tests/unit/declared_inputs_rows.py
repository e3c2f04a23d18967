"""Inputs of declared formats: dumps of trainers, rows of data sets, results of benchmarks, and traces."""

import json
from typing import Any

from testkit.declared import DeclaredInput, lines

ASK = {"role": "user", "content": "How many legs has an ant?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"of": "legs"}'}}
GAVE = {"role": "tool", "tool_call_id": "c1", "content": "6"}
COUNTS: list[tuple[Any, ...]] = [("count", '{"of": "legs"}', "c1")]


def answer(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | fields


def batch_line(name: str, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": 200, "request_id": "r", "body": body}
    return {"id": f"batch_req_{name}", "custom_id": name, "response": response, "error": None}


BATCH_OUTPUT = lines(
    batch_line(
        "legs",
        {
            "id": "chatcmpl-1",
            "model": "m-1",
            "choices": [
                {"index": 0, "message": answer("Six."), "finish_reason": "stop"},
                {"index": 1, "message": answer("Eight"), "finish_reason": "length"},
            ],
            "usage": {"prompt_tokens": 7, "completion_tokens": 5},
        },
    ),
    batch_line(
        "wings",
        {
            "id": "resp-1",
            "model": "m-2",
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Look it up."}]},
                {"type": "function_call", "call_id": "c9", "name": "find", "arguments": "{}"},
            ],
            "usage": {"input_tokens": 4, "output_tokens": 2},
        },
    ),
)
BATCH_INPUT = lines(
    {
        "custom_id": "legs",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m-1", "n": 2, "messages": [ASK], "temperature": 0.5},
    },
    {
        "custom_id": "wings",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"model": "m-2", "instructions": "Be short.", "input": "How many wings has a fly?"},
    },
    {"custom_id": "other", "method": "POST", "url": "/v1/responses", "body": {"model": "m-2", "input": "?"}},
)


def rllm_step(prompt: list[int], action: list[int], reward: float, *messages: dict[str, Any]) -> dict[str, Any]:
    return {
        "chat_completions": list(messages),
        "prompt_ids": prompt,
        "response_ids": action,
        "logprobs": [-0.25] * len(action),
        "reward": reward,
        "done": reward > 0,
        "mc_return": 0.0,
        "weight_version": 4,
        "model_response": messages[-1]["content"],
        "info": {},
    }


RLLM_EPISODE = {
    "id": "ants:1",
    "task": {"question": ASK["content"], "ground_truth": "6"},
    "termination_reason": "max_turns_exceeded",
    "is_correct": True,
    "trajectories": [
        {
            "uid": "uid-a",
            "name": "solver",
            "reward": None,
            "steps": [
                rllm_step([1, 2], [3], 0.0, ASK, answer("Let me look.")),
                rllm_step(
                    [1, 2, 3, 4],
                    [5, 6],
                    1.0,
                    ASK,
                    answer("Let me look."),
                    {"role": "user", "content": "Do."},
                    answer("6"),
                ),
            ],
        },
        {"uid": "uid-b", "name": "judge", "reward": 0.5, "steps": [rllm_step([7], [8], 0.5, ASK, answer("Right."))]},
    ],
    "metrics": {},
}
SLIME_SAMPLES = {
    "rollout_id": 12,
    "samples": [
        {
            "group_index": group,
            "index": group,
            "prompt": [ASK],
            "tokens": [1, 2, 3, 4, 5],
            "response": text,
            "response_length": 3,
            "label": "6",
            "reward": reward,
            "loss_mask": [1, 0, 1],
            "rollout_log_probs": [-0.5, 0.0, -1.5],
            "weight_versions": ["2", "3"],
            "status": status,
            "remove_sample": removed,
            "metadata": {},
        }
        for group, text, reward, status, removed in (
            (0, "6", 1.0, "completed", False),
            (1, "8", {"acc": 0.0, "format": 1.0}, "truncated", True),
        )
    ],
}
AREAL_SAMPLES = lines(
    *(
        {
            "task_id": 7,
            "sample_idx": index,
            "seqlen": 9,
            "prompt_len": 4,
            "head_version": 3 - index,
            "tail_version": 3,
            "reward": 1.0 - index,
            "prompt": "<u>How many?",
            "completion": text,
        }
        for index, text in enumerate(("6<e>", "8<e>"))
    )
)
ROLL_RLVR = {
    "global_step": [5, 5],
    "id": ["p1", "p1"],
    "prompt": ["<u>How many?"] * 2,
    "messages": [json.dumps([ASK])] * 2,
    "ground_truth": ["6", "6"],
    "domain": ["nature", "nature"],
    "responses": ["6", "8"],
    "scores": [1.0, 0.0],
    "sampling_params": ["{}", "{}"],
}
ROLL_SEGMENTS = [
    [ASK, answer(None, tool_calls=[CALL]), GAVE, answer("Six.")],
    [{"role": "system", "content": "So far: six."}, {"role": "user", "content": "And a fly?"}, answer("Six, too.")],
]


def roll_trajectory(env: int, score: float) -> str:
    return json.dumps(
        {
            "trajectory_id": f"zoo_0_5_3_{env}_2_42_20260101_101010_123456",
            "env_info": {"env_id": env, "group_id": 3, "tag": "zoo", "seed": 42, "episode_id": 2},
            "length_info": {"terminated": True, "truncated": env > 0},
            "reward_info": {"episode_reward": score},
            "failure_info": {"stop_reason": "FINISH"},
        }
    )


ROLL_AGENTIC = {
    "trajectory_data": [roll_trajectory(0, 1.0), roll_trajectory(1, 0.0), roll_trajectory(2, 0.0)],
    "messages": [json.dumps(ROLL_SEGMENTS), json.dumps(ROLL_SEGMENTS[:1]), "[]"],
    "tools": ["[]"] * 3,
    "exp_name": ["ants"] * 3,
    "global_step": [5] * 3,
}
BFCL_TURNS = {
    "id": "multi_turn_base_0",
    "result": [[[{"count": '{"of": "legs"}'}], ["Six."]]],
    "inference_log": [
        [{"role": "state_info", "class_name": "Zoo", "content": {"ants": 1}}],
        {
            "begin_of_turn_query": [ASK],
            "step_0": [
                answer([{"count": '{"of": "legs"}'}]),  # type: ignore[arg-type]
                {"role": "handler_log", "content": "Decoded."},
                {"role": "tool", "content": "6"},
            ],
            "step_1": [answer(["Six."], reasoning_content="Count.")],  # type: ignore[arg-type]
        },
    ],
    "input_token_count": [[10, 20]],
    "output_token_count": [[3, 4]],
    "latency": [[0.5, 0.25]],
}
BFCL_ALONE = {
    "id": "parallel_1",
    "result": [{"count": "{}"}, {"find": "{}"}],
    "input_token_count": 8,
    "output_token_count": 9,
    "latency": 1.5,
}
LOOKED = {"calls": COUNTS, "saw": "How many legs has an ant?"}
SAID = {"saw": "6", "said": "Six."}
SECOND_PROMPT = [ASK, answer(None, tool_calls=[CALL]), GAVE]


def chat_response(message: dict[str, Any], prompt_tokens: int, tokens: int) -> dict[str, Any]:
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"choices": choices, "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}}


def langchain(kind: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"lc": 1, "type": "constructor", "id": ["langchain", kind], "kwargs": {"content": content} | fields}


def langsmith_run(name: str, kind: str, at: int, inputs: Any, outputs: Any, **fields: Any) -> dict[str, Any]:
    run = {
        "id": name,
        "name": name,
        "run_type": kind,
        "trace_id": "r0",
        "parent_run_id": None if name == "r0" else "r0",
    }
    times = {"start_time": f"2026-01-01T10:00:0{at}", "end_time": f"2026-01-01T10:00:0{at + 1}"}
    return run | times | {"inputs": inputs, "outputs": outputs, "error": None, "extra": {}} | fields


LANGCHAIN_CALLS = [{"name": "count", "args": {"of": "legs"}, "id": "c1", "type": "tool_call"}]
USAGE = {"input_tokens": 5, "output_tokens": 2, "total_tokens": 7}
LANGSMITH_RUNS = [
    langsmith_run(
        "r0",
        "chain",
        0,
        {"input": "ants"},
        {"output": "Six."},
        reference_example_id="ex-1",
        session_id="ants-1",
        feedback_stats={"correct": {"n": 2, "avg": 0.5}},
    ),
    langsmith_run(
        "r1",
        "llm",
        1,
        {"messages": [[langchain("HumanMessage", str(ASK["content"]))]]},
        {
            "generations": [
                [{"text": "", "message": langchain("AIMessage", "", tool_calls=LANGCHAIN_CALLS, usage_metadata=USAGE)}]
            ]
        },
        total_cost="0.001",
        extra={"metadata": {"ls_model_name": "m-1"}},
    ),
    langsmith_run("r2", "tool", 3, {"input": "legs"}, {"output": langchain("ToolMessage", "6", tool_call_id="c1")}),
    langsmith_run(
        "r3",
        "llm",
        5,
        {
            "messages": [
                [
                    langchain("HumanMessage", str(ASK["content"])),
                    langchain("AIMessage", "", tool_calls=LANGCHAIN_CALLS),
                    langchain("ToolMessage", "6", tool_call_id="c1"),
                ]
            ]
        },
        {"generations": [[{"text": "Six.", "message": langchain("AIMessage", "Six.")}]]},
        prompt_tokens=9,
        completion_tokens=1,
        extra={"metadata": {"ls_model_name": "m-1"}},
    ),
]


def mlflow_span(name: str, kind: str, at: int, inputs: Any, outputs: Any, **attributes: Any) -> dict[str, Any]:
    recorded = {"mlflow.traceRequestId": "tr-1", "mlflow.spanType": kind}
    recorded |= {"mlflow.spanInputs": inputs, "mlflow.spanOutputs": outputs} | attributes
    return {
        "trace_id": "tr-1",
        "span_id": name,
        "parent_span_id": None if name == "s0" else "s0",
        "name": name,
        "start_time_unix_nano": 1_760_000_000_000_000_000 + at * 10**9,
        "end_time_unix_nano": 1_760_000_001_000_000_000 + at * 10**9,
        "events": [],
        "status": {"code": "STATUS_CODE_OK", "message": ""},
        "attributes": {key: json.dumps(attribute) for key, attribute in recorded.items()},
    }


MLFLOW_TRACE = {
    "info": {
        "trace_id": "tr-1",
        "state": "OK",
        "tags": {"mlflow.traceName": "ants"},
        "assessments": [
            {"assessment_name": "correct", "feedback": {"value": True}, "rationale": "It is six."},
            {"assessment_name": "expected", "expectation": {"value": "6"}},
        ],
    },
    "data": {
        "spans": [
            mlflow_span("s0", "AGENT", 0, {"q": "ants"}, "Six."),
            mlflow_span(
                "s1",
                "CHAT_MODEL",
                1,
                {"model": "m-1", "messages": [ASK]},
                chat_response(answer(None, tool_calls=[CALL]), 5, 2),
                **{"mlflow.chat.tokenUsage": {"input_tokens": 5, "output_tokens": 2}},
            ),
            mlflow_span("s2", "TOOL", 3, {"of": "legs"}, "6"),
            mlflow_span(
                "s3",
                "CHAT_MODEL",
                5,
                {"model": "m-1", "messages": SECOND_PROMPT},
                chat_response(answer("Six."), 9, 1),
                **{"mlflow.chat.tokenUsage": {"input_tokens": 9, "output_tokens": 1}},
            ),
        ]
    },
}


def weave_call(name: str, op: str, at: int, inputs: Any, output: Any, **fields: Any) -> dict[str, Any]:
    return {
        "id": name,
        "project_id": "zoo/ants",
        "trace_id": "w-1",
        "parent_id": None if name == "w0" else "w0",
        "op_name": f"weave:///zoo/ants/op/{op}:v1",
        "started_at": f"2026-01-01T10:00:0{at}Z",
        "ended_at": f"2026-01-01T10:00:0{at + 1}Z",
        "attributes": {},
        "inputs": inputs,
        "output": output,
    } | fields


WEAVE_CALLS = [
    weave_call(
        "w0",
        "ants",
        0,
        {"q": "ants"},
        "Six.",
        summary={
            "weave": {"feedback": [{"feedback_type": "wandb.runnable.correct", "payload": {"output": {"score": 0.5}}}]}
        },
    ),
    weave_call(
        "w1",
        "openai.chat.completions.create",
        1,
        {"self": {}, "model": "m-1", "messages": [ASK]},
        chat_response(answer(None, tool_calls=[CALL]), 5, 2),
        attributes={"weave": {"kind": "llm"}},
    ),
    weave_call("w2", "count", 3, {"of": "legs"}, "6", attributes={"weave": {"kind": "tool"}}),
    weave_call(
        "w3",
        "openai.chat.completions.create",
        5,
        {"self": {}, "model": "m-1", "messages": SECOND_PROMPT},
        chat_response(answer("Six."), 9, 1),
    ),
]


def braintrust_row(name: str, kind: str, at: int, **fields: Any) -> dict[str, Any]:
    metrics = {"start": 1_760_000_000 + at, "end": 1_760_000_001 + at} | fields.pop("metrics", {})
    attributes = {"name": name, "type": kind} | fields.pop("span_attributes", {})
    return {
        "id": f"row-{name}",
        "experiment_id": "exp-1",
        "span_id": name,
        "root_span_id": "b0",
        "span_parents": [] if name == "b0" else ["b0"],
        "is_root": name == "b0",
        "span_attributes": attributes,
        "metrics": metrics,
    } | fields


BRAINTRUST_ROWS = [
    braintrust_row("b0", "eval", 0, input="ants", output="Six.", expected="6", scores={"correct": 0.5}),
    braintrust_row(
        "b1",
        "llm",
        1,
        input=[ASK],
        output=[{"index": 0, "message": answer(None, tool_calls=[CALL]), "finish_reason": "stop"}],
        metadata={"model": "m-1"},
        metrics={"prompt_tokens": 5, "completion_tokens": 2},
    ),
    braintrust_row("b2", "tool", 3, input={"of": "legs"}, output="6"),
    braintrust_row(
        "b3",
        "llm",
        5,
        input=SECOND_PROMPT,
        output=[{"index": 0, "message": answer("Six."), "finish_reason": "stop"}],
        metadata={"model": "m-1"},
        metrics={"prompt_tokens": 9, "completion_tokens": 1},
    ),
    braintrust_row("b4", "score", 7, output={"score": 0.5}, scores={"correct": 0.5}),
    braintrust_row(
        "b5", "llm", 8, input=[ASK], output=[{"message": answer("Ok.")}], span_attributes={"purpose": "scorer"}
    ),
]
TRACED = [
    LOOKED | {"model": "m-1", "tokens": (5, 2), "finish": "stop"},
    SAID | {"model": "m-1", "tokens": (9, 1), "finish": "stop"},
]
ASKED = "How many legs has an ant?"

INPUTS = [
    DeclaredInput(
        "openai_batch",
        "output.jsonl",
        BATCH_OUTPUT,
        [
            {"steps": [{"said": "Six.", "model": "m-1", "tokens": (7, None), "finish": "stop", "untrained": True}]},
            {"steps": [{"said": "Eight", "model": "m-1", "tokens": (7, None), "finish": "length", "untrained": True}]},
            {
                "steps": [
                    {
                        "thought": "Look it up.",
                        "calls": [("find", "{}", "c9")],
                        "model": "m-2",
                        "tokens": (4, 2),
                        "untrained": True,
                    }
                ]
            },
        ],
        cut=30,
    ),
    DeclaredInput(
        "rllm",
        "run/train_step_2_epoch_0/episode.json",
        json.dumps(RLLM_EPISODE),
        [
            {
                "status": "truncated",
                "return": 1.0,
                "scores": {"is_correct": 1.0},
                "steps": [{"saw": ASKED, "said": "Let me look."}, {"saw": "Do.", "said": "6"}],
            },
            {
                "status": "truncated",
                "return": 0.5,
                "scores": {"is_correct": 1.0},
                "steps": [{"saw": ASKED, "said": "Right."}],
            },
        ],
        sibling=("uid-a", "uid-c"),
    ),
    DeclaredInput(
        "skyrl",
        "dumped_evals/global_step_8_evals/zoo.jsonl",
        lines(
            *(
                {
                    "input_prompt": "<u>How many?",
                    "output_response": text,
                    "score": score,
                    "stop_reason": stop,
                    "env_class": "zoo",
                    "env_extras": {"reward_spec": {"ground_truth": truth}},
                    "data_source": "zoo",
                }
                for text, score, stop, truth in (
                    ("6", [0.25, 0.5], "stop", "6"),
                    ("8", 0.0, "length", "6"),
                    ("8", 1.0, "stop", "8"),
                )
            )
        ),
        [
            {"return": 0.75, "steps": [{"saw": "<u>How many?", "said": "6"}]},
            {"status": "truncated", "return": 0.0, "steps": [{"saw": "<u>How many?", "said": "8"}]},
            {"return": 1.0, "steps": [{"saw": "<u>How many?", "said": "8"}]},
        ],
        cut=20,
    ),
    DeclaredInput(
        "slime",
        "rollout_data/12.json",
        json.dumps(SLIME_SAMPLES),
        [
            {"return": 1.0, "steps": [{"saw": ASKED, "said": "6", "tokens": (None, 3)}]},
            {
                "status": "truncated",
                "scores": {"acc": 0.0, "format": 1.0},
                "steps": [{"saw": ASKED, "said": "8", "tokens": (None, 3), "untrained": True}],
            },
        ],
    ),
    DeclaredInput(
        "areal",
        "run/rollout/3/7.jsonl",
        AREAL_SAMPLES,
        [
            {"return": 1.0, "steps": [{"saw": "<u>How many?", "said": "6<e>"}]},
            {"return": 0.0, "steps": [{"saw": "<u>How many?", "said": "8<e>"}]},
        ],
        cut=20,
    ),
    DeclaredInput(
        "roll",
        "rollout_dump_data.step_5.jsonl",
        lines(ROLL_RLVR),
        [
            {"return": 1.0, "steps": [{"saw": ASKED, "said": "6"}]},
            {"return": 0.0, "steps": [{"saw": ASKED, "said": "8"}]},
        ],
    ),
    DeclaredInput(
        "roll",
        "agentic/rollout_dump_data.step_5.jsonl",
        lines(ROLL_AGENTIC),
        [
            {
                "return": 1.0,
                "steps": [LOOKED, SAID, {"saw": "And a fly?", "said": "Six, too.", "history": "rewritten"}],
            },
            {"status": "truncated", "return": 0.0, "steps": [LOOKED, SAID]},
        ],
    ),
    DeclaredInput(
        "xlam",
        "rows.jsonl",
        lines(
            {
                "id": 3,
                "query": ASKED,
                "answers": json.dumps(
                    [{"name": "count", "arguments": {"of": "legs"}}, {"name": "find", "arguments": {}}]
                ),
                "tools": json.dumps([{"name": "count", "parameters": {"of": {"type": "str"}}}]),
            },
            {"id": 4, "query": ASKED, "answers": "[]", "tools": "[]"},
        ),
        [
            {"steps": [{"saw": ASKED, "calls": [("count", {"of": "legs"}, None), ("find", {}, None)]}]},
            {"steps": [{"saw": ASKED, "said": "[]"}]},
        ],
        cut=20,
    ),
    DeclaredInput(
        "nemotron",
        "math.jsonl",
        lines(
            {
                "input": [ASK],
                "output": "<think>Ants.</think>Six.",
                "category": "science",
                "license": "none",
                "reasoning": "on",
                "generator": "m-1",
                "used_in_training": ["Nano"],
                "version": "v1",
                "system_prompt": "detailed thinking on",
            }
        ),
        [{"steps": [{"saw": ASKED, "said": "<think>Ants.</think>Six."}]}],
        cut=20,
    ),
    DeclaredInput(
        "bfcl",
        "BFCL_v4_mixed_result.json",
        lines(BFCL_TURNS, BFCL_ALONE),
        [
            {
                "steps": [
                    {"saw": ASKED, "calls": [("count", '{"of": "legs"}', None)]},
                    {"saw": "6", "thought": "Count.", "said": "Six."},
                ]
            },
            {"steps": [{"calls": [("count", "{}", None), ("find", "{}", None)], "untrained": True}]},
        ],
        unknown=('{"role": "handler_log", "content": "Decoded."}', '{"role": "oracle", "content": "Decoded."}'),
        cut=20,
    ),
    DeclaredInput(
        "langsmith",
        "runs.jsonl",
        lines(*reversed(LANGSMITH_RUNS)),
        [
            {
                "scores": {"correct": 0.5},
                "steps": [
                    {"saw": ASKED, "calls": [("count", {"of": "legs"}, "c1")], "model": "m-1", "tokens": (5, 2)},
                    SAID | {"model": "m-1", "tokens": (9, 1)},
                ],
            }
        ],
    ),
    DeclaredInput(
        "mlflow", "trace.json", json.dumps(MLFLOW_TRACE), [{"scores": {"correct": 1.0}, "steps": TRACED}], cut=9
    ),
    DeclaredInput(
        "weave", "calls.jsonl", lines(*reversed(WEAVE_CALLS)), [{"scores": {"correct": 0.5}, "steps": TRACED}]
    ),
    DeclaredInput(
        "braintrust",
        "events.json",
        json.dumps({"events": BRAINTRUST_ROWS, "cursor": None}),
        [{"scores": {"correct": 0.5}, "steps": TRACED}],
        cut=9,
    ),
]
for _case in INPUTS:
    for _episode in _case.episodes:
        _episode.setdefault("status", "completed")
