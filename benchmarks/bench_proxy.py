"""What the recording proxy costs: calls through it beside calls to the engine itself, in the same run.

    python benchmarks/bench_proxy.py [--runs 3] [--calls 600] [--at-once 1 64 1000] [--durable]

The engine, the proxy (`trajlake record`) and the clients are processes of their own. The engine answers at once, whole
or as a stream of 30 chunks with token ids and log-probabilities, so that what is measured is overhead: a real one takes
longer for its first token than all of this. Of several runs the best counts, as others may use the machine. `added` is
the difference of percentiles through the proxy and bare. CPU is that of the proxy's process, from the first call until
all is in the lake. With --durable a proxy that syncs each call before its answer stands beside one that does not, not
beside the engine. Prints a Markdown table; the measurement is that of whole answers at the first level of `--at-once`.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
from aiohttp import web
from measurement import Measurement, add_measurement_option, write_measurement

ROOT = Path(__file__).parents[1]
CHUNKS = 30
PROMPT = "You are at the door of a castle. " * 30
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer sk-bench-0123456789abcdefghij"}
WARM_UP = 20
"""Calls."""


def chunk(delta: dict[str, str], **more: object) -> bytes:
    """One event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": None} | more
    return (
        b"data: " + json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [choice]}).encode() + b"\n\n"
    )


IDS = list(range(200))
VALUES = {"content": [{"token": "look ", "logprob": -0.25, "bytes": None, "top_logprobs": []}]}
STREAM = [
    chunk({"role": "assistant", "content": ""}).replace(
        b'"choices"', b'"prompt_token_ids": %s, "choices"' % str(IDS).encode()
    ),
    *(chunk({"content": "look "}, token_ids=[7], logprobs=VALUES) for _ in range(CHUNKS)),
    chunk({}, finish_reason="stop", token_ids=[2], logprobs=VALUES),
    b"data: [DONE]\n\n",
]
WHOLE = {
    "id": "c",
    "object": "chat.completion",
    "model": "policy",
    "prompt_token_ids": IDS,
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "look " * CHUNKS},
            "logprobs": {"content": VALUES["content"] * CHUNKS},
            "token_ids": [7] * CHUNKS,
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 200, "completion_tokens": CHUNKS},
}


def engine() -> None:
    """Answer calls until the process is ended; the port is printed."""

    async def call(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response(WHOLE)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in STREAM:
            await response.write(event)
            await asyncio.sleep(0)  # as many writes as chunks
        return response

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", call)
        app.router.add_get("/version", version)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", flush=True)
        await asyncio.Event().wait()

    with suppress(KeyboardInterrupt):
        asyncio.run(run())


async def measured(base: str, calls: int, at_once: int, *, stream: bool) -> tuple[list[float], float]:
    """Seconds of each call, sorted, and of all; 64 episodes are under way."""
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": PROMPT}], "stream": stream}).encode()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=HEADERS) as session:
        numbers = iter(range(WARM_UP + calls))
        seconds: list[float] = []

        async def agent(most: int) -> None:
            for number in numbers:
                began = time.perf_counter()
                task = {"X-Trajlake-Task": f"task-{number % 64}"}
                async with session.post(f"{base}/chat/completions", data=body, headers=task) as response:
                    data = await response.read()
                    assert response.status == 200, data
                seconds.append(time.perf_counter() - began)
                if number == most:
                    return

        await agent(WARM_UP - 1)
        seconds.clear()
        began = time.perf_counter()
        await asyncio.gather(*(agent(-1) for _ in range(at_once)))
        return sorted(seconds), time.perf_counter() - began


@contextmanager
def process(*command: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and the base URL that it prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        try:
            yield started, next(word for word in line.split() if word.startswith("http"))
        finally:
            started.send_signal(signal.SIGINT)
            started.communicate()


def cpu_and_memory(pid: int) -> tuple[float, float]:
    """Seconds of CPU of a process so far, and the most memory that it had, in MB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) / 1024


def through_proxy(
    url: str, calls: int, at_once: int, *options: str, stream: bool
) -> tuple[list[float], float, float, float]:
    """The same through a proxy of its own, with its CPU seconds a call and its peak of memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-c", "from lake.cli import main; main()", "record", "--port", "0")
        places = ("--upstream", url, "--lake", f"{folder}/lake", "--spool", f"{folder}/spool")
        with process(*command, *places, *options) as (proxy, base):
            before, _ = cpu_and_memory(proxy.pid)
            seconds, whole = asyncio.run(measured(base, calls, at_once, stream=stream))
            after, memory = cpu_and_memory(proxy.pid)
        return seconds, whole, (after - before) / (calls + WARM_UP), memory


def at(seconds: list[float], share: float) -> float:
    """A percentile, in ms."""
    return seconds[int(len(seconds) * share)] * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--calls", type=int, default=600, help="of each run; 1,000 at once make 3 each at least")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 1000], help="calls under way")
    add_measurement_option(parser)
    parser.add_argument("--durable", action="store_true", help="compare proxies with and without --durable")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        engine()
        return
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    bare_name, name, options = ("without", "durable", ("--durable",)) if arguments.durable else ("bare", "proxy", ())
    head = ("at once", "answers", f"{bare_name}, calls/s", f"{name}, calls/s", "ratio", f"{bare_name} p50 / p99, ms")
    head += ("added p50 / p99, ms", "CPU, ms a call", "peak RSS, MB")
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}")
    with process(sys.executable, __file__, "--engine") as (_, url):
        measurements, waits_ms = [], dict[str, float]()
        for at_once in arguments.at_once:
            calls = max(arguments.calls, 2 * at_once)
            for stream in (False, True):
                bare, best = None, None
                for _ in range(arguments.runs):
                    if arguments.durable:
                        run = through_proxy(url, calls, at_once, stream=stream)[:2]
                    else:
                        run = asyncio.run(measured(url, calls, at_once, stream=stream))
                    bare = run if bare is None or run[1] < bare[1] else bare
                    more = through_proxy(url, calls, at_once, *options, stream=stream)
                    best = more if best is None or more[1] < best[1] else best
                assert bare is not None
                assert best is not None
                added = [at(best[0], share) - at(bare[0], share) for share in (0.5, 0.99)]
                rates = calls / bare[1], calls / best[1]
                cells = [
                    f"{at_once:,}",
                    "streams" if stream else "whole",
                    *(f"{rate:,.0f}" for rate in rates),
                    f"{rates[1] / rates[0]:.2f}",
                    f"{at(bare[0], 0.5):,.1f} / {at(bare[0], 0.99):,.1f}",
                    f"{added[0]:,.1f} / {added[1]:,.1f}",
                    f"{best[2] * 1e3:.2f}",
                    f"{best[3]:,.0f}",
                ]
                print(f"| {' | '.join(cells)} |", flush=True)
                if at_once == arguments.at_once[0]:
                    answer = "30 chunks" if stream else "a whole answer"
                    for name_of_share, share in (("median", 0.5), ("p99", 0.99)):
                        waits_ms[f"proxy, {answer}, {name_of_share}"] = at(best[0], share)
                measurement = Measurement(
                    job="calls through the proxy",
                    size=f"{calls:,} whole answers, {at_once:,} at once",
                    seconds=best[1],
                    clock="wall",
                    throughput=rates[1],
                    unit="calls/s",
                    peak_gb=best[3] / 1e3,
                    baseline="calls to the engine",
                    baseline_seconds=bare[1],
                    ratio=best[1] / bare[1],
                    waits_ms=waits_ms,
                )
                measurements.append(measurement)
        write_measurement(arguments.measurement, measurements[0])


if __name__ == "__main__":
    main()
