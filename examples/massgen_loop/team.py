"""A team of MassGen: three agents answer a question, see each other's answers, and vote.

MassGen's own classes, on the model behind `client`: which of the calls was whose, it decides; the recording proxy that
`client` names keeps each of them with its exact tokens.
"""

from loguru import logger
from massgen import Orchestrator, SingleAgent
from massgen.agent_config import AgentConfig
from massgen.backend.chat_completions import ChatCompletionsBackend
from massgen.token_manager import TokenCostCalculator

from pipelines.collect.agents import Client, Result
from pipelines.collect.environments import Task

NAMES = ("ada", "bob", "eve")

logger.disable("massgen")  # which warns at each call that the price of the model is unknown


class NoPrices(TokenCostCalculator):
    """MassGen's asks the web for the prices of models, for each agent, while all others wait."""

    def _fetch_litellm_pricing(self) -> None:
        return None


class Backend(ChatCompletionsBackend):
    """MassGen's, which remembers that the engine failed: a team goes on without the agent, and may win nothing."""

    def __init__(self, client: Client, **sampling: float) -> None:
        super().__init__(client.api_key, base_url=client.base_url, model=client.model, **sampling)
        self.token_calculator = NoPrices()
        self.errors: list[str] = []

    async def stream_with_tools(self, messages, tools, **settings):
        """The chunks of a call."""
        async for chunk in super().stream_with_tools(messages, tools, **settings):
            if chunk.type == "error":
                self.errors.append(chunk.error)
            yield chunk


async def ask(task: Task, client: Client) -> Result:
    """One session; its reward is whether the answer that won the vote is right.

    Raises:
        ConnectionError: the engine failed, so the session says nothing of the team.
    """
    agents = {}
    for number, name in enumerate(NAMES):
        own = client.sampling | {"seed": client.sampling["seed"] + number}  # else all would say the same
        agents[name] = SingleAgent(Backend(client, **own), name)
    config = AgentConfig(
        max_new_answers_per_agent=1, defer_voting_until_all_answered=True, skip_final_presentation=True
    )
    team = Orchestrator(agents, config=config)
    async for _ in team.chat(task.messages):
        pass
    if errors := [error for agent in agents.values() for error in agent.backend.errors]:
        raise ConnectionError(errors[0])
    winner = team.agent_states.get(team._selected_agent)
    is_right = winner is not None and winner.answer == task.ground_truth
    return Result(reward=float(is_right), ground_truth=task.ground_truth)
