"""Play tasks of a verifiers taskset with its own runner, as a program for the Python that has verifiers.

It imports nothing of this project: verifiers pins another version of openai, so both may need separate environments.

    argument    {"config": the environment's config, "most": maximum number of tasks}, as JSON
    first line  {"seats": names of the agents, "tasks": [{key, idx, name, prompt, answer}]}
    request     {"number", "key", "seats": {name: {base_url, headers}}, "model", "sampling"}: play; {"cancel": number}
    reply       {"number", "episode": verifiers' own record of it, or "error"}

The program ends when its input ends. What tasksets print goes to stderr. Source: verifiers 0.4.0 (Prime Intellect,
MIT), v1/env.py, v1/utils/loaders.py, v1/cli/eval.
"""

import asyncio
import json
import os
import sys
from typing import Any, TextIO

KEY_VARIABLE = "TRAJLAKE_AGENT_KEY"
"""Environment variable with the key of the endpoint."""

_DEFAULTS = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Default agent config: run on this machine, without tools."""


class TasksetWorker:
    """The taskset and its running rollouts."""

    def __init__(self, out: TextIO, arguments: dict[str, Any]) -> None:
        self._out, self._config = out, arguments["config"]
        # Imported here: tools that import this module may lack verifiers.
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

        config = resolve_env_config(self._config)
        taskset = load_taskset(config.taskset)
        if not taskset.bounded or arguments["most"] is not None:
            taskset = taskset.take(arguments["most"] or 1000)
        self._tasks = {task.key: task for task in taskset}
        self._seats = list(agent_config_fields(config))
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Play requests until the input ends."""
        tasks = [task.data.model_dump(mode="json") | {"key": key} for key, task in self._tasks.items()]
        fields = ("key", "idx", "name", "prompt", "answer")
        self._say({"seats": self._seats, "tasks": [{name: data.get(name) for name in fields} for data in tasks]})
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            if (number := request.get("cancel")) is not None:
                if number in self._playing:
                    self._playing[number].cancel()
            else:
                self._playing[request["number"]] = asyncio.create_task(self._answer(request))
        playing = list(self._playing.values())
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            reply = {"episode": await self._play(request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        finally:
            del self._playing[request["number"]]
        self._say({"number": request["number"]} | reply)

    async def _play(self, request: dict[str, Any]) -> Any:
        """Play an episode, each agent at its own address, and return verifiers' record."""
        from verifiers.v1 import EvalClientConfig, ModelContext, SamplingConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        clients = {seat: at | {"api_key_var": KEY_VARIABLE, "type": "eval"} for seat, at in request["seats"].items()}
        seats = {seat: _DEFAULTS | self._config.get(seat, {}) | {"client": client} for seat, client in clients.items()}
        environment = load_environment(resolve_env_config({**self._config, **seats}))
        context = ModelContext(
            model=request["model"],
            client=EvalClientConfig(**clients[self._seats[0]]),
            sampling=SamplingConfig(**request["sampling"]),
        )
        async with environment.serving():
            episode = await environment.run_episode(self._tasks[request["key"]], context)
        return episode.to_record()

    def _say(self, message: dict[str, Any]) -> None:
        print(json.dumps(message), file=self._out, flush=True)


def main() -> None:
    """Serve requests. stdout carries the protocol, so other output goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    arguments = json.loads(sys.argv[1])
    try:
        worker = TasksetWorker(out, arguments)
    except Exception as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        sys.exit(1)
    asyncio.run(worker.serve())


if __name__ == "__main__":
    main()
