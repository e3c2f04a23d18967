"""Write tests/golden/formats/verifiers_traces/traces.jsonl with the real classes of verifiers.

python -m venv /tmp/env-verifiers && /tmp/env-verifiers/bin/pip install verifiers==0.4.0
/tmp/env-verifiers/bin/python tests/golden/formats/make_verifiers_traces.py

Three episodes of a training run: one with tools and a sub-agent's branch, one whose last turn was sampled twice and
which was trained on since, and one that failed before it was scored, played by two agents.
"""

from pathlib import Path

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.episode import EnvInfo, Episode, GroupInfo, PolicySpan, TrainRunInfo, TrainWorkInfo
from verifiers.v1.graph import MessageNode
from verifiers.v1.semantic import ParentLink
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Error, ModelCall, TimeSpan, Timing, Trace, TraceTask
from verifiers.v1.types import (
    AssistantMessage,
    SamplingConfig,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    Usage,
    UserMessage,
)
from verifiers.v1.utils.trace_store import write_episode

FOLDER = Path(__file__).parent / "verifiers_traces"
START = 1_750_000_000.0
TOOL = Tool(name="add", description="Adds.", parameters={"type": "object"})
CALL = ToolCall(id="call_1", name="add", arguments='{"a": 1, "b": 2}')


class Data(TaskData):
    """A row of a data set."""

    answer: str = ""


def node(message, parent=None, ids=(), sampled=0, **more):
    """A node; the last `sampled` of its tokens are."""
    mask = [False] * (len(ids) - sampled) + [True] * sampled
    logprobs = [-0.125 * (n + 1) for n in range(sampled)]
    made = {"parent": parent, "message": message, "token_ids": list(ids), "mask": mask, "logprobs": logprobs}
    return MessageNode(**made, sampled=bool(sampled), timestamp=START, **more)


def call(at, **more):
    """A call that led to a node."""
    usage = Usage(prompt_tokens=10 * at, completion_tokens=2, cached_input_tokens=4, cost=0.5)
    span = TimeSpan(start=START + at, end=START + at + 0.5)
    sampling = SamplingConfig(temperature=0.75, top_p=0.5)
    made = {"finish_reason": "stop", "usage": usage, "time": span} | more
    return ModelCall(node=at, model="tiny", endpoint="/chat/completions", sampling=sampling, **made)


def trace(task, name, nodes, calls, *, trainable=True, **more):
    """A trace of one agent."""
    config = AgentConfig(model="tiny", sampling=SamplingConfig(temperature=0.75))
    agent = AgentInfo(config=config, name=name, trainable=trainable)
    timing = Timing(start=START, scoring=TimeSpan(start=START + 8, end=START + 9))
    made = {"is_completed": True, "ok": True, "stop_condition": "agent_completed"} | more
    return Trace(id=f"trace-{name}-{task.key}", task=task, agent=agent, nodes=nodes, calls=calls, timing=timing, **made)


def episode(number, task, traces, **more):
    """An episode of step 7."""
    work = TrainWorkInfo(step=7, policy=PolicySpan(start=6, end=6 + number // 2))
    made = {"env": EnvInfo(id="toy", name="toy-env"), "group": GroupInfo(id=f"group-{task.key}"), "ok": True}
    run = TrainRunInfo(id="run-1", work=work)
    return Episode(id=f"episode-{number}", task=task, run=run, traces=traces, **made | more)


def with_tools(task):
    """A tool, a sub-agent with its own conversation, and a limit of length."""
    nodes = [
        node(SystemMessage(content="Use add."), ids=[1, 2], tools=[TOOL]),
        node(UserMessage(content="1 + 2?"), 0, [3, 4]),
        node(AssistantMessage(reasoning_content="Call it.", tool_calls=[CALL]), 1, [5, 6, 7], 2),
        node(ToolMessage(tool_call_id="call_1", content="3", name="add"), 2, [8]),
        node(UserMessage(content="Check 3."), ids=[20]),
        node(
            AssistantMessage(content="Right."),
            4,
            [21, 22],
            1,
            semantic_parents=[ParentLink(node=2, type="subagent_call")],
        ),
        node(AssistantMessage(content="It is 3"), 3, [9, 10], 1),
    ]
    calls = [call(2, finish_reason="tool_calls"), call(5), call(6, finish_reason="length")]
    calls.append(ModelCall(model="tiny", error=Error(type="ProviderError", message="overloaded")))
    made = trace(task, "solver", nodes, calls, tools=[TOOL])
    made.record_reward("correct", 1.0, 2.0)
    made.record_reward("short", 0.5)
    made.record_metric("turns", 3)
    return made


def resampled(task):
    """The last turn twice; the second has been trained on, with an advantage of 0."""
    nodes = [
        node(UserMessage(content="2 + 2?"), ids=[1]),
        node(AssistantMessage(content="Wait."), 0, [2, 3], 1),
        node(UserMessage(content="Go on."), 1, [4]),
        node(AssistantMessage(content="5"), 2, [5, 6], 1),
        node(AssistantMessage(content="4"), 2, [5, 7], 1, advantages=[0.0], trainer_logprobs=[-0.25]),
    ]
    made = trace(task, "solver", nodes, [call(1), call(3), call(4)])
    made.record_reward("correct", 1.0)
    made.info = {"level": "easy", "advantage": 0.0, "train": {"effective": True}}
    return made


def failed(task):
    """A solver whose scoring never ran, and a judge that is not trained."""
    nodes = [node(UserMessage(content="3 + 3?"), ids=[1]), node(AssistantMessage(content="6"), 0, [2, 3], 1)]
    error = Error(type="TaskError", message="boom")
    state = {"ok": False, "errors": [error], "stop_condition": "task_error", "rewards": {"correct": None}}
    judged = [
        node(UserMessage(content="Is 6 right?")),
        MessageNode(parent=0, message=AssistantMessage(content="Yes"), sampled=True, timestamp=START),
    ]
    return [trace(task, "judge", judged, [call(1)], trainable=False), trace(task, "solver", nodes, [call(1)], **state)]


def main():
    """Write the file anew."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "traces.jsonl").unlink(missing_ok=True)
    tasks = [
        TraceTask(type="Sum", data=Data(idx=n, prompt="?", answer="3"), key=f"sums/{n % 2}", hash="h") for n in range(3)
    ]
    made = [
        episode(0, tasks[0], [with_tools(tasks[0])]),
        episode(1, tasks[2], [resampled(tasks[2])]),
        episode(2, tasks[1], failed(tasks[1]), ok=False, errors=[Error(type="EnvError", message="late")]),
    ]
    for item in made:
        write_episode(FOLDER, item)


main()
