"""From options to a player: which environment or agent, which engines, which model.

Options are plain values, so that they stand in a job's parameters and travel to other processes; keys of engines do
not: they come from the environment variable TRAJLAKE_ENGINE_KEY.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from lake.errors import UsageError
from lake.formats.base.secrets import REDACTED, is_secret, redacted
from lake.live.places import root_of
from lake.records import EpisodeRecord
from lake.storage.atomic import read_whole
from pipelines.collect import user_code
from pipelines.collect.engines import Sampling
from pipelines.collect.engines.chat import ChatEndpoint, ChatOptions, ChatPolicy
from pipelines.collect.engines.find import KEY, api_of, engine_at, folders_of, refuse_unserved
from pipelines.collect.engines.http import reached
from pipelines.collect.engines.pool import Pool
from pipelines.collect.engines.sharing import Shared, SharingConfig
from pipelines.collect.environments import Environment
from pipelines.collect.model_folder import model_folder, policy_name
from pipelines.collect.play_environment import EnvironmentPlayer
from pipelines.collect.players import Player
from pipelines.collect.policies import Speaker
from pipelines.collect.policies.engine_policy import EnginePolicy, SpeakerOptions
from pipelines.collect.policies.lockstep import LockStepSpeaker
from pipelines.collect.policies.rendering import token_ids
from pipelines.collect.policies.tool_calls import ToolFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS = "prompts"
"""The environment of tasks that are nothing but a prompt."""
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Whatever a model's folder asks for, nothing is fetched and no code in it is run."""
_AGENT_CALL_SECONDS = 600.0
"""How long an engine may be silent before an agent, unless something else is said."""


_NOT_OF_OPENAI = {"top_k", "min_p"}
"""What engines take and clients of OpenAI's have no argument for."""


class PlayerOptions(BaseModel, frozen=True, extra="forbid"):
    """Who plays, and with what."""

    env: str | None = None
    """An environment, as `environments.loading` reads it."""
    env_args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments."""
    system_prompt: str | None = None
    """Text that conversations of the environment open with."""
    agent: str | None = None
    """An agent instead."""
    agent_python: str | None = None
    """Of the environment that verifiers is installed in."""
    engines: tuple[str, ...] = ()
    """Base URLs; none: the model plays in this process."""
    api: Literal["auto", "vllm", "sglang", "chat"] = "auto"
    """What they are; auto asks them."""
    model: str | None = None
    """Folder of the model, whose tokenizer the engines' is; of an endpoint for chats and for agents, its name."""
    tokenizer: str | None = None
    """Folder of the tokenizer, where that is not the model's."""
    policy: str | None = None
    """`episodes.policy`; `pipelines.collect.model_folder.policy_name` of the model unless given."""
    sampling: Sampling = Sampling()
    """How actions are sampled."""
    answer_schema: dict[str, Any] | None = None
    """JSON schema that every answer is held to."""
    adapter: str | None = None
    """LoRA adapter of the engines to speak with."""
    tool_format: ToolFormat = "auto"
    """How the model writes tool calls; auto: as its chat template does."""
    requests_per_second: float | None = Field(default=None, gt=0)
    """Limit of all calls to engines."""
    tokens_per_second: float | None = Field(default=None, gt=0)
    """Limit of the tokens of these calls, prompts and answers."""
    parallel_calls: int = Field(default=256, ge=1)
    """Calls that one engine gets at once."""
    step_seconds: float | None = None
    """See `EnvironmentPlayer`."""
    call_seconds: float | None = None
    """See `EnvironmentPlayer`."""
    max_steps: int | None = None
    """See `EnvironmentPlayer`."""


class PlayedWeights(NamedTuple):
    """Which weights play, where they change from round to round."""

    folder: Path
    """Model in Hugging Face layout; engines read it at the same path."""
    version: int
    """What their tokens carry as policy version; engines have been given it."""


def told_options(options: PlayerOptions) -> dict[str, Any]:
    """The options as a job's parameters say them: without keys, passwords, and users in addresses."""
    said = without_keys(options.model_dump(mode="json"))
    return {**said, "engines": [reached(url)[0] for url in options.engines]}


def without_keys(value: Any) -> Any:
    """Nested settings with what looks like a key, or is named like one, left out."""
    if isinstance(value, dict):
        return {key: REDACTED if is_secret(key) else without_keys(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_keys(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


class LoadedModel(NamedTuple):
    """A model in this process."""

    model: Any
    tokenizer: "PreTrainedTokenizerBase"


def load_model(place: str, tokenizer: str | None = None) -> LoadedModel:
    """A folder in Hugging Face layout, and the tokenizer of another where one is named. Raises UsageError."""
    from transformers import AutoModelForCausalLM

    words = _tokenizer(tokenizer or place)
    try:
        model: Any = read_whole(
            Path(place), lambda folder: AutoModelForCausalLM.from_pretrained(model_folder(folder), **_LOCAL)
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {place} cannot be loaded: {error}") from error
    return LoadedModel(model.eval(), words)


LoadModel = Callable[[str, str | None], LoadedModel]


def player_of(
    options: PlayerOptions,
    lake_uri: str,
    run: str,
    weights: PlayedWeights | None = None,
    *,
    load: LoadModel = load_model,
) -> Player:
    """Whoever plays as the options say.

    Args:
        options: see there.
        lake_uri: agents are recorded into it by a proxy.
        run: name of the run.
        weights: which play, in place of the model's; engines that come back without them get them again.
        load: loads the model that plays in this process.

    Raises:
        UsageError: options that do not go together, or name nothing that is there.
        MissingExtraError: a package is not installed.
    """
    if (options.env is None) == (options.agent is None):
        raise UsageError("give --env or --agent, one of them: an environment to play, or an agent")
    if options.agent is not None:
        return _agent_player(options, lake_uri, run)
    environment = _environment(options)  # before engines are asked and a model is loaded, which takes longer
    speaker, engines = _speaker(options, weights, load)
    return EnvironmentPlayer(
        environment,
        speaker,
        engines=engines,
        step_seconds=options.step_seconds,
        call_seconds=options.call_seconds,
        max_steps=options.max_steps,
    )


def recorded_only(target: str | None) -> Callable[[EpisodeRecord], bool] | None:
    """The function that --record-only names. Raises UsageError: there is none."""
    if target is None:
        return None
    found: Any = user_code.load(target, "--record-only").value
    if not callable(found):
        raise UsageError(f"--record-only {target} is no function; valid: function(record) -> bool")
    wants: Callable[[EpisodeRecord], bool] = found
    return wants


def _environment(options: PlayerOptions) -> Callable[[], Environment]:
    from pipelines.collect.environments.loading import load_environment
    from pipelines.collect.environments.prompts import Prompt
    from pipelines.collect.environments.system_prompt import prompting

    assert options.env is not None
    make = Prompt if options.env == PROMPTS else load_environment(options.env, options.env_args)
    return prompting(make, options.system_prompt)


def _agent_player(options: PlayerOptions, lake_uri: str, run: str) -> Player:
    from pipelines.collect.agents.loading import load_agent
    from pipelines.collect.agents.play_agent import AgentPlayer

    assert options.agent is not None
    if options.system_prompt is not None:
        raise UsageError("--system-prompt is for environments: an agent writes its messages itself")
    if not options.engines:
        raise UsageError("--agent needs --engine URL: an agent talks to a model behind an address; `trajlake serve -h`")
    if options.requests_per_second is not None or options.tokens_per_second is not None:
        raise UsageError("limits of requests and tokens are for environments: an agent makes its calls by itself")
    _refuse_unserved(options)
    # The temperature is always said: without it nobody knows the probabilities of what was sampled.
    said = options.sampling.model_fields_set | {"temperature"}
    sampling = options.sampling.model_dump(include=said - _NOT_OF_OPENAI)
    if beyond := options.sampling.model_dump(include=said & _NOT_OF_OPENAI):
        sampling["extra_body"] = beyond
    return AgentPlayer(
        load_agent(options.agent, python=options.agent_python),
        options.engines,
        lake_uri=lake_uri,
        spool=root_of(lake_uri, f"collect-{run}-agents"),
        environment=options.agent,
        model=options.model,
        api_key=os.environ.get(KEY, "none"),
        sampling=sampling,
        call_seconds=_AGENT_CALL_SECONDS if options.call_seconds is None else options.call_seconds,
    )


def _speaker(
    options: PlayerOptions, weights: PlayedWeights | None, load: LoadModel
) -> tuple[Speaker, Shared[Any] | None]:
    """Who decides, and the engines that it has to itself."""
    if not options.engines:
        return _in_process(options, weights, load), None
    apis = {url: api_of(url) if options.api == "auto" else options.api for url in options.engines}
    if len(set(apis.values())) > 1:
        found = ", ".join(f"{reached(url)[0]} {api}" for url, api in apis.items())
        raise UsageError(f"the engines are of several kinds: {found}; collect from one kind at a time")
    config = SharingConfig(
        most_calls=options.parallel_calls,
        requests_per_second=options.requests_per_second,
        tokens_per_second=options.tokens_per_second,
    )
    if "chat" in apis.values():
        return _chat(options, config)
    source = options.tokenizer or options.model
    if source is None:
        raise UsageError(
            "--engine needs the tokenizer of its model: --model FOLDER or --tokenizer FOLDER; or --api chat, which "
            "records text only"
        )
    tokens = model_folder(source)
    for url in options.engines:
        _refuse_other_tokens(url, tokens)
    folder, version = (None, None) if weights is None else weights
    members = [engine_at(url, api) for url, api in apis.items()]
    pool = Pool(members, config, wanted_version=version, folder=folder)
    name = options.policy or _policy_of(options, source)
    speaking = SpeakerOptions(
        sampling=options.sampling,
        schema=options.answer_schema,
        adapter=options.adapter,
        tool_format=options.tool_format,
    )
    return EnginePolicy(pool, _tokenizer(source), name=name, options=speaking), pool


def _policy_of(options: PlayerOptions, tokenizer: str) -> str:
    """What the policy behind engines is called: after the model's folder, else the one that they say they serve."""
    served = [] if options.model else [folder for url in options.engines for folder in folders_of(url)]
    name = policy_name(options.model or next((folder for folder in served if Path(folder).is_dir()), tokenizer))
    return name if options.adapter is None else f"{name}+{options.adapter}"


def _refuse_other_tokens(url: str, source: Path) -> None:
    """Raise UsageError: an engine's model has other token ids than the tokenizer; known where both folders are here."""
    ours = source / "tokenizer.json"
    for folder in folders_of(url):
        theirs = Path(folder, "tokenizer.json")
        if theirs.is_file() and ours.is_file() and token_ids(theirs) != token_ids(ours):
            raise UsageError(
                f"{reached(url)[0]} serves {folder}, whose tokenizer is another one than that in {source}: give the "
                f"engine's, --tokenizer {folder}"
            )


def _chat(options: PlayerOptions, config: SharingConfig) -> tuple[Speaker, Shared[ChatEndpoint]]:
    if options.model is None:
        raise UsageError("--api chat needs --model NAME: the name that the endpoint knows the model by")
    _refuse_unserved(options)
    endpoints = Shared([ChatEndpoint(url, key=os.environ.get(KEY)) for url in options.engines], config)
    chat = ChatOptions(model=options.model, sampling=options.sampling, output_schema=options.answer_schema)
    return ChatPolicy(endpoints, chat, name=options.policy), endpoints


def _refuse_unserved(options: PlayerOptions) -> None:
    """Raise UsageError: an engine has no model of the name that rollouts would ask it for."""
    if options.model is not None:
        for url in options.engines:
            refuse_unserved(url, options.model)


def _in_process(options: PlayerOptions, weights: PlayedWeights | None, load: LoadModel) -> Speaker:
    from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy

    place = options.model if weights is None else str(weights.folder)
    if place is None:
        raise UsageError("give --engine URL, or --model FOLDER to play it in this process")
    if options.answer_schema is not None or options.adapter is not None:
        raise UsageError("--schema and --adapter are for engines; serve the model: `trajlake serve -h`")
    given = options.sampling
    if given.top_p != 1 or given.top_k or given.min_p or given.stop or not given.temperature:
        raise UsageError("a model in this process samples with --temperature alone; serve it: `trajlake serve -h`")
    model, tokenizer = load(place, options.tokenizer)
    name, version = options.policy or policy_name(place), 0 if weights is None else weights.version
    sampling = SamplingConfig(temperature=given.temperature, max_action_tokens=given.max_tokens)
    return LockStepSpeaker(TransformersPolicy(model, tokenizer, name=name, version=version, sampling=sampling))


def _tokenizer(folder: str) -> "PreTrainedTokenizerBase":
    from transformers import AutoTokenizer

    # One text is encoded at a time: threads for that only spin, and take the processor from an engine on this machine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        tokenizer: PreTrainedTokenizerBase = read_whole(
            Path(folder), lambda place: AutoTokenizer.from_pretrained(model_folder(place), **_LOCAL)
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} holds no tokenizer: {error}") from error
    if tokenizer.chat_template is None:
        raise UsageError(f"the tokenizer in {folder} has no chat template; --tokenizer FOLDER names one that has")
    return tokenizer
