"""Write Inspect logs with the real tool: what tests/unit/test_formats_inspect.py reads next to the real files.

Run once per version, each in its own environment:

    python -m venv /tmp/inspect-env && /tmp/inspect-env/bin/pip install inspect-ai==0.3.285
    /tmp/inspect-env/bin/python tests/golden/formats/make_inspect.py

0.3.285 writes zstd.eval, and of two samples the same log as log.json.gz and chunked.eval; 0.3.100 writes
deflate.eval; 0.3.8 writes version_1.json. No model is called: a provider that is defined here answers by what it is
asked. Of the second epoch one sample is kept, so that the files stay small.
"""

import gzip
import re
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import inspect_ai
from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput, modelapi
from inspect_ai.model._model import ModelAPI
from inspect_ai.scorer import Score, Target, accuracy, includes, mean, scorer
from inspect_ai.solver import Generate, TaskState, generate, solver, system_message

HERE = Path(__file__).parent / "inspect"
VERSION = tuple(int(part) for part in version("inspect-ai").split("."))
IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 12
LONG = "Numbers are added digit by digit, from the right, and what does not fit is carried to the left. " * 2


def output(text: Any, stop_reason: str = "stop", **fields: Any) -> ModelOutput:
    """What the model says, with a usage."""
    made = ModelOutput.from_content("scripted", text, stop_reason=stop_reason)
    made.choices[0].message = ChatMessageAssistant(content=text, source="generate", **fields)
    made.usage = {"input_tokens": 40, "output_tokens": 6, "total_tokens": 46 + 30 * (VERSION > (0, 3, 99))}
    if VERSION > (0, 3, 99):
        made.usage |= {"input_tokens_cache_read": 30, "reasoning_tokens": 2}
    return ModelOutput.model_validate(made.model_dump())


def answer(asked: list[Any]) -> ModelOutput:
    """By the question, and by whether a tool answered."""
    said = "\n".join(message.text for message in asked if message.role == "user")
    turns = sum(message.role == "assistant" for message in asked)
    if "grade" in said:
        return output("GRADE: C")
    if VERSION < (0, 3, 99) or "Hello" in said:
        return output("The sum is 3." if "1 + 2" in said else "Hello.", "length" if "1 + 2" not in said else "stop")
    from inspect_ai.model import ContentReasoning, ContentText
    from inspect_ai.tool import ToolCall

    function, arguments = ("add", {"a": 1, "b": 2}) if "1 + 2" in said else ("add", {"a": 5, "b": "x"})
    if asked[-1].role != "tool" or "forever" in said:
        call = ToolCall(id=f"call_{turns}", function=function, arguments=arguments, type="function")
        parts = [ContentReasoning(reasoning="I add.", signature="c2ln"), ContentText(text=f"I call {function}.")]
        return output(parts, "tool_calls", tool_calls=[call])
    return output("The sum is 3." if "1 + 2" in said else "I do not know.")


@modelapi(name="scripted")
class Scripted(ModelAPI):
    """A provider that answers alone."""

    async def generate(self, *given: Any, **named: Any) -> ModelOutput:
        return answer(given[0] if given else named["input"])


@scorer(metrics=[accuracy()] if VERSION < (0, 3, 99) else {"tone": [mean()], "length": [mean()]})
def style() -> Any:
    """A score of two parts."""

    async def score(state: TaskState, target: Target) -> Score:
        length = len(state.output.completion)
        if "forever" in str(state.input):
            return Score(value={"tone": float("nan"), "length": length}, explanation="No tone.")
        return Score(value={"tone": True, "length": length}, answer=state.output.completion, metadata={"by": "rule"})

    return score


def cases() -> list[Sample]:
    """A sum, a loop of calls that fail until a limit ends it, an error, an image, a shot before the question."""
    shot = [ChatMessageUser(content="0 + 0?"), ChatMessageAssistant(content="0"), ChatMessageUser(content="1 + 2?")]
    return [
        Sample(id="sum", input="What is 1 + 2?", target="3", metadata={"level": 1}),
        Sample(id="shot", input=shot, target=["3", "three"]),
        *([] if VERSION < (0, 3, 99) else tool_samples()),
    ]


def tool_samples() -> list[Sample]:
    """Those that need tools, images, and limits."""
    from inspect_ai.model import ContentImage, ContentText

    seen = ChatMessageUser(content=[ContentText(text="Hello. What is this?"), ContentImage(image=IMAGE)])
    return [
        Sample(id="loop", input="Call forever.", target="never"),
        Sample(id="error", input="Hello, break down.", target=""),
        Sample(id=7, input=[seen], target="a picture"),
    ]


def solvers() -> list[Any]:
    if VERSION < (0, 3, 99):
        return [system_message("You add."), generate()]
    from inspect_ai.log import transcript
    from inspect_ai.model import get_model
    from inspect_ai.scorer import score
    from inspect_ai.solver import use_tools
    from inspect_ai.tool import tool

    @tool
    def add() -> Any:
        async def execute(a: int, b: int) -> str:
            """Add two numbers.

            Args:
                a: first
                b: second
            """
            return str(a + b)

        return execute

    @solver
    def aside() -> Any:
        """Notes, a score on the way, a call that is no decision, an error."""

        async def solve(state: TaskState, generate: Generate) -> TaskState:
            transcript().info({"note": LONG})
            state.store.set("asides", 1)
            if state.sample_id == "sum":
                await score(state)
                await get_model().generate("Please grade this." + LONG)
            if state.sample_id == "error":
                raise RuntimeError("broken down")
            return state

        return solve

    return [system_message("You add. " + LONG), use_tools(add()), generate(), aside()]


@task
def addition() -> Task:
    data = MemoryDataset(cases(), name="sums")
    if VERSION < (0, 3, 99):
        return Task(dataset=data, plan=solvers(), scorer=includes())
    return Task(dataset=data, solver=solvers(), scorer=[includes(), style()], message_limit=7)


def without_paths(text: str) -> str:
    """A traceback without the places where files lie."""
    return re.sub(r'(File "|│ |^)(/[^":│]*/)', r"\1", text, flags=re.MULTILINE)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        options = {} if VERSION < (0, 3, 99) else {"fail_on_error": False, "log_model_api": True, "epochs": 2}
        if (0, 3, 99) < VERSION < (0, 3, 200):
            options.pop("log_model_api")
        (log,) = inspect_ai.eval(addition(), model="scripted/agent", log_dir=folder, temperature=0.5, **options)
        print(log.status)
        if VERSION < (0, 3, 99):
            (written,) = Path(folder).glob("*.json")
            (HERE / "version_1.json").write_text(written.read_text("utf-8"), "utf-8")
            return
        from inspect_ai.log import write_eval_log

        log = read_eval_log(log.location)
        log.samples = [sample for sample in log.samples if sample.epoch == 1 or sample.id == "sum"]
        for sample in log.samples:
            if sample.error:
                sample.error.traceback = without_paths(sample.error.traceback)
                sample.error.traceback_ansi = ""
            for event in sample.events:
                if event.event == "error":
                    event.error = sample.error
        log.eval.task_file = log.eval.revision = None
        name = "deflate.eval" if VERSION < (0, 3, 200) else "zstd.eval"
        write_eval_log(log, str(HERE / name), format="eval")
        if VERSION > (0, 3, 200):
            from inspect_ai.log._recorders.chunked import convert_eval_logs_to_chunked

            log = read_eval_log(str(HERE / name))
            log.samples = [sample for sample in log.samples if sample.epoch == 1 and sample.id in ("loop", 7)]
            write_eval_log(log, f"{folder}/log.json", format="json")
            packed = gzip.compress(Path(f"{folder}/log.json").read_bytes(), mtime=0)
            (HERE / "log.json.gz").write_bytes(packed)
            write_eval_log(log, f"{folder}/chunked.eval", format="eval")
            options = {"overwrite": True, "chunk_size": 5, "attachments_chunk_bytes": 300}
            convert_eval_logs_to_chunked(f"{folder}/chunked.eval", str(HERE), **options)


if __name__ == "__main__":
    sys.exit(main())
