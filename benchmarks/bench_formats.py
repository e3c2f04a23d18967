"""Ingest of the three heaviest formats as a ratio to parsing the same file with the format's fastest library.

    python benchmarks/bench_formats.py [--megabytes 1000] [--repeat 3] [--formats messages ...] [--keep FOLDER]

messages: JSON lines of chats; baseline: msgspec decodes every line. claude_code: one folder of sessions; baseline: the
same. inspect: one `.eval` archive, deflated; baseline: zipfile inflates every sample and msgspec decodes it. Each
run is a process of its own, pinned to one core, and the two alternate. Prints a Markdown table; the measurement is that
of the last format.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from measurement import Measurement, add_measurement_option, write_measurement  # noqa: E402

WORDS = [f"word{n:04d}" for n in range(4000)]
TURNS = 20


def text(rng: random.Random, words: int) -> str:
    """Words that compress about as text does."""
    return " ".join(rng.choices(WORDS, k=words))


def chats(megabytes: int, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    """Chats of some turns with tool calls, until they are so many bytes."""
    size = 0
    while size < megabytes * 1_000_000:
        chat: list[dict[str, Any]] = [{"role": "system", "content": text(rng, 100)}]
        chat.append({"role": "user", "content": text(rng, 50)})
        for turn in range(TURNS):
            function = {"name": "find", "arguments": json.dumps({"query": text(rng, 5)})}
            call = {"id": f"call_{turn}", "type": "function", "function": function}
            chat.append({"role": "assistant", "content": text(rng, 40), "tool_calls": [call]})
            chat.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": text(rng, 120)})
        chat.append({"role": "assistant", "content": text(rng, 60)})
        size += len(json.dumps(chat))
        yield chat


def make_messages(folder: Path, megabytes: int) -> Path:
    """Chats as JSON lines."""
    path = folder / "messages.jsonl"
    with path.open("w") as file:
        for number, chat in enumerate(chats(megabytes, random.Random(1))):
            file.write(json.dumps({"id": number // 4, "messages": chat}) + "\n")
    return path


def make_claude_code(folder: Path, megabytes: int) -> Path:
    """Chats as sessions, a file each."""
    target = folder / "sessions"
    target.mkdir()
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for number, chat in enumerate(chats(megabytes, random.Random(2))):
        session = f"00000000-0000-4000-8000-{number:012d}"
        parent = None
        with Path(target, f"{session}.jsonl").open("w") as file:
            for place, message in enumerate(chat[1:]):
                uuid = f"{number:08d}-0000-4000-8000-{place:012d}"
                line = {"parentUuid": parent, "isSidechain": False, "cwd": "/home/u/shop", "sessionId": session}
                line |= {
                    "version": "2.0.14",
                    "uuid": uuid,
                    "timestamp": (began + timedelta(minutes=number, seconds=place)).isoformat().replace("+00:00", "Z"),
                }
                if message["role"] == "assistant":
                    content: list[Any] = [{"type": "text", "text": message["content"]}]
                    for call in message.get("tool_calls", ()):
                        arguments = json.loads(call["function"]["arguments"])
                        content.append({"type": "tool_use", "id": call["id"], "name": "find", "input": arguments})
                    usage = {"input_tokens": 1, "output_tokens": 1}
                    answer = {"id": f"msg_{number}_{place}", "role": "assistant", "model": "m", "content": content}
                    line |= {"type": "assistant", "message": answer | {"usage": usage}}
                elif message["role"] == "tool":
                    result = {
                        "type": "tool_result",
                        "tool_use_id": message["tool_call_id"],
                        "content": message["content"],
                    }
                    line |= {"type": "user", "message": {"role": "user", "content": [result]}}
                else:
                    line |= {"type": "user", "message": {"role": "user", "content": message["content"]}}
                parent = uuid
                file.write(json.dumps(line) + "\n")
    return target


def make_inspect(folder: Path, megabytes: int) -> Path:
    """Chats as the samples of a log, each message also in the events of its calls, as Inspect has them."""
    path = folder / "log.eval"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        spec = {
            "eval_id": "e",
            "run_id": "r",
            "task": "t",
            "task_id": "i",
            "model": "m",
            "created": "2026-01-01T00:00:00Z",
        }
        header = {
            "version": 2,
            "status": "success",
            "eval": spec | {"dataset": {}, "config": {"epochs": 1}},
            "plan": {},
        }
        archive.writestr("header.json", json.dumps(header))
        for number, chat in enumerate(chats(megabytes // 2, random.Random(3))):
            messages = []
            for place, message in enumerate(chat):
                told = message | {"id": f"m{place}"}
                if "tool_calls" in told:
                    told["tool_calls"] = [
                        {"id": call["id"], "function": "find", "arguments": json.loads(call["function"]["arguments"])}
                        for call in told["tool_calls"]
                    ]
                messages.append(told | ({"source": "generate"} if told["role"] == "assistant" else {}))
            said = [message for message in messages if message["role"] == "assistant"]
            events = [
                {"event": "model", "uuid": f"u{place}", "model": "m", "output": {"choices": [{"message": message}]}}
                for place, message in enumerate(said)
            ]
            sample = {"id": number, "epoch": 1, "input": "i", "target": "t", "messages": messages, "events": events}
            archive.writestr(
                f"samples/{number}_epoch_1.json", json.dumps(sample | {"scores": {"match": {"value": "C"}}})
            )
    return path


MAKERS = {"messages": make_messages, "claude_code": make_claude_code, "inspect": make_inspect}


def parse(path: Path) -> int:
    """The baseline: every value decoded, none kept."""
    import msgspec

    decode = msgspec.json.Decoder().decode
    if path.suffix == ".eval":
        with zipfile.ZipFile(path) as archive:
            return sum(bool(decode(archive.read(name))) for name in archive.namelist())
    count = 0
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        with file.open("rb") as lines:
            for line in lines:
                decode(line)
                count += 1
    return count


def ingest(path: Path) -> int:
    """The job: episodes and steps in a new lake, committed."""
    import lake

    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        report = lake.open(Path(folder, "lake"), create=True).ingest(path)
    assert report.new == report.records, report
    return report.new


TASKS = {"parse": parse, "ingest": ingest}


def run_task(task: str, path: Path) -> None:
    """One measured run, in this process."""
    import lake.write.ingest
    from lake.formats.registry import FORMATS

    assert FORMATS
    assert lake.write.ingest
    began, cpu_began = time.perf_counter(), time.process_time()
    records = TASKS[task](path)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps({"records": records, "seconds": seconds, "cpu": cpu, "peak_gb": peak}))


def measure(task: str, path: Path, core: int) -> dict[str, Any]:
    """Figures of one run in a fresh process on one core."""
    command = [sys.executable, __file__, "--task", task, "--file", str(path)]
    environment = os.environ | {"POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pin = {"preexec_fn": lambda: os.sched_setaffinity(0, {core})} if hasattr(os, "sched_setaffinity") else {}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, **pin)  # type: ignore[call-overload]
    return dict(json.loads(done.stdout))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder for the files, which are made if they are not there")
    parser.add_argument("--formats", nargs="+", choices=MAKERS, default=list(MAKERS))
    add_measurement_option(parser)
    parser.add_argument("--task", choices=TASKS)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    if arguments.task:
        run_task(arguments.task, arguments.file)
        return
    print("| format | MB | episodes | parse, CPU s | ingest, CPU s | ratio (CPU) | ratio (wall) | peak of ingest, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.formats:
            home = (arguments.keep or Path(folder)) / name
            if not home.exists():
                home.mkdir(parents=True)
                MAKERS[name](home, arguments.megabytes)
            path = next(iter(sorted(home.iterdir())))
            runs = [{task: measure(task, path, 0) for task in TASKS} for _ in range(arguments.repeat)]
            megabytes = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path])) / 1e6
            episodes = runs[0]["ingest"]["records"]

            def median(task: str, figure: str, runs: list[dict[str, dict[str, Any]]] = runs) -> float:
                return float(statistics.median(run[task][figure] for run in runs))

            ratios = [statistics.median(run["ingest"][c] / run["parse"][c] for run in runs) for c in ("cpu", "seconds")]
            peak_gb = max(run["ingest"]["peak_gb"] for run in runs)
            cells = [f"{megabytes:,.0f}", f"{episodes:,}"]
            cells += [f"{median(task, 'cpu'):.1f}" for task in TASKS]
            cells += [f"{ratio:.2f}" for ratio in ratios] + [f"{peak_gb:.2f}"]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
        seconds = median("ingest", "cpu")
        measurement = Measurement(
            job=f"ingest, {name}",
            size=f"{megabytes:,.0f} MB, {episodes:,} episodes",
            seconds=seconds,
            clock="CPU",
            throughput=megabytes / seconds,
            unit="MB/s",
            peak_gb=peak_gb,
            baseline="msgspec parses the same bytes",
            baseline_seconds=median("parse", "cpu"),
            ratio=ratios[0],
            aims={"peak_gb": 1.0},
        )
        write_measurement(arguments.measurement, measurement)


if __name__ == "__main__":
    main()
