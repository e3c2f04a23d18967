"""Plays tasks of a verifiers taskset with its own runner; a program of its own, for the Python that verifiers is in.

It imports nothing of this project: verifiers pins another openai, so the two may live in different environments.

    argument    {"config": the environment's config, "most": tasks at most}, as JSON
    it says     {"seats": names of the agents, "tasks": [{key, idx, name, prompt, answer}]}, a line
    is asked    {"number", "key", "seats": {name: {base_url, headers}}, "model", "sampling"}: play; {"cancel": number}
    answers     {"number", "episode": verifiers' own record of it, or "error"}

It ends with its input. What tasksets print goes to stderr. Source: verifiers 0.4.0 (Prime Intellect, MIT), v1/env.py,
v1/utils/loaders.py, v1/cli/eval.
"""

import asyncio
import json
import os
import sys
from typing import Any, TextIO

KEY_VARIABLE = "TRAJLAKE_AGENT_KEY"
"""Holds the key that the endpoint wants."""

_DEFAULTS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""How agents run unless the arguments say otherwise: on this machine, without tools of their own."""


class Worker:
    """The taskset, and the rollouts that are under way."""

    def __init__(self, out: TextIO, asked: dict[str, Any]) -> None:
        self._out, self._config = out, asked["config"]
        # Not at the top: this project's own Python, where modules are looked at, need not have it.
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

        config = resolve_env_config(self._config)
        taskset = load_taskset(config.taskset)
        if not taskset.bounded or asked["most"] is not None:
            taskset = taskset.take(asked["most"] or 1000)
        self._tasks = {task.key: task for task in taskset}
        self._seats = list(agent_config_fields(config))
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Play what is asked until the input ends."""
        found = [task.data.model_dump(mode="json") | {"key": key} for key, task in self._tasks.items()]
        shown = ("key", "idx", "name", "prompt", "answer")
        self._say({"seats": self._seats, "tasks": [{name: data.get(name) for name in shown} for data in found]})
        while line := await asyncio.to_thread(sys.stdin.readline):
            asked = json.loads(line)
            if (number := asked.get("cancel")) is not None:
                if number in self._playing:
                    self._playing[number].cancel()
            else:
                self._playing[asked["number"]] = asyncio.create_task(self._answer(asked))
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _answer(self, asked: dict[str, Any]) -> None:
        try:
            told = {"episode": await self._play(asked)}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del self._playing[asked["number"]]
        self._say({"number": asked["number"]} | told)

    async def _play(self, asked: dict[str, Any]) -> Any:
        """What verifiers records of an episode; each agent calls at its own address."""
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        clients = {seat: at | {"api_key_var": KEY_VARIABLE, "type": "eval"} for seat, at in asked["seats"].items()}
        seats = {seat: _DEFAULTS | self._config.get(seat, {}) | {"client": client} for seat, client in clients.items()}
        environment = load_environment(resolve_env_config({**self._config, **seats}))
        context = ModelContext(
            model=asked["model"],
            client=EvalClientConfig(**clients[self._seats[0]]),
            sampling=SamplingConfig(**asked["sampling"]),
        )
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[asked["key"]], context)
        return episode.to_record()

    def _say(self, told: dict[str, Any]) -> None:
        print(json.dumps(told), file=self._out, flush=True)


def main() -> None:
    """Serve; stdout is the protocol's, so what else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asked = json.loads(sys.argv[1])
    try:
        worker = Worker(out, asked)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        sys.exit(1)
    asyncio.run(worker.serve())


if __name__ == "__main__":
    main()
