"""A rollout worker as in reward-kit's plan: an agent plays a maze, and gives StepData and (messages, ground_truth).

    python worker.py scripted                         rollouts of a player that guesses: texts, no tokens
    python worker.py play --model MODEL --run NAME    rollouts of a model, with exact tokens and log-probabilities

In the maze a right word leads one door on, a wrong one leads nowhere. Rollouts of a task all begin at its first door.
So siblings meet in the same states, which is what GiGPO compares.
"""

import argparse
import asyncio
import random
from dataclasses import asdict, dataclass, field

import lake
from lake.live.rollouts import RolloutHook

WORDS = ("left", "right")
TASKS = {
    "cave": ["left", "right", "right"],
    "tower": ["right", "left", "left"],
    "forest": ["right", "right", "left"],
    "palace": ["left", "left", "right"],
}
"""Task -> its ground truth: the words that open its doors."""
TURNS, MOST_TOKENS = 5, 8


@dataclass
class StepData:
    """One decision, with the fields of reward-kit's StepData."""

    system_step_index: int
    observation_data: str
    action_taken: dict
    raw_policy_output: str
    resulting_messages_history: list
    policy_logprobs: dict | None
    policy_value_estimate: float | None = None
    is_done: bool = False
    step_info: dict = field(default_factory=dict)
    base_reward: float | None = None


class Maze:
    """The environment of one rollout."""

    def __init__(self, task):
        self.task, self.path, self.door = task, TASKS[task], 0

    def view(self):
        """Return what an observer sees: the door, or the treasure."""
        if self.door == len(self.path):
            return f"{self.task}: treasure"
        return f"{self.task}: door {self.door + 1}"

    def act(self, word):
        """Say a word, and return what happens."""
        is_right = word == self.path[self.door]
        self.door += is_right
        return ("It opens. " if is_right else "It stays shut. ") + self.view()

    @property
    def is_done(self):
        """Tell whether the treasure is found."""
        return self.door == len(self.path)


class Guesser:
    """The AgentPolicy that needs no model: it says one of the words."""

    completion_params = None

    def __init__(self, seed):
        self.random = random.Random(seed)

    def act(self, messages):
        """Return a word, and no tokens."""
        return self.random.choice(WORDS), None


class Player:
    """The AgentPolicy of a model: it samples an answer, and tells the exact tokens and their log-probabilities."""

    def __init__(self, folder, seed, temperature=1.0):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # the model is tiny: threads would only wait for each other
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.random = torch.Generator().manual_seed(seed)
        self.completion_params = {"model": folder, "temperature": temperature, "top_p": 1.0, "top_k": 0}

    def act(self, messages):
        """Return what the model says, and the tokens in reward-kit's `policy_logprobs`."""
        torch, end = self.torch, self.tokenizer.eos_token_id
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        said, logprobs = [], []
        with torch.inference_mode():
            while len(said) < MOST_TOKENS and end not in said:
                logits = self.model(torch.tensor([prompt + said])).logits[0, -1].float()
                distribution = (logits / self.completion_params["temperature"]).log_softmax(-1)
                token = int(torch.multinomial(distribution.exp(), 1, generator=self.random))
                said.append(token)
                logprobs.append(float(distribution[token]))
        tokens = {"prompt_token_ids": prompt, "completion_token_ids": said, "completion_logprobs": logprobs}
        return self.tokenizer.decode([token for token in said if token != end]).strip(), tokens


async def run_episode(task, policy):
    """Play one rollout: (List[StepData], (messages, ground_truth)), as reward-kit's worker gives them."""
    maze, steps = Maze(task), []
    messages = [{"role": "user", "content": maze.view()}]
    for index in range(TURNS):
        word, tokens = policy.act(messages)
        observed = messages[-1]["content"]
        seen = maze.act(word)
        state = observed.rpartition(". ")[2]  # what the maze looks like, without how it came to that
        messages = [*messages, {"role": "assistant", "content": word}, {"role": "user", "content": seen}]
        steps.append(
            StepData(
                system_step_index=index,
                observation_data=state,
                action_taken={"type": "text", "content": word},
                raw_policy_output=word,
                resulting_messages_history=messages,
                policy_logprobs=tokens,
                is_done=maze.is_done,
            )
        )
        if maze.is_done:
            break
        await asyncio.sleep(0)  # an agent that calls a server waits here, and other rollouts go on
    return steps, (messages, TASKS[task])


async def run(policy, hook, siblings):
    """All rollouts, concurrently; each is recorded when it has ended."""

    async def one(task, number):
        steps, (messages, ground_truth) = await run_episode(task, policy)
        hook.episode(
            [asdict(step) for step in steps],
            messages,
            ground_truth,
            task=task,
            rollout_id=f"{task}-{number}",
            rollout_index=number,
            completion_params=policy.completion_params,
        )

    async with asyncio.TaskGroup() as group:
        for task in TASKS:
            for number in range(siblings):
                group.create_task(one(task, number))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("player", choices=["scripted", "play"])
    parser.add_argument("--lake", default="L")
    parser.add_argument("--run", default="scripted")
    parser.add_argument("--model", default="imitation/final")
    parser.add_argument("--siblings", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lake.open(given.lake, create=True)
    policy = Guesser(given.seed) if given.player == "scripted" else Player(given.model, given.seed)
    with lake.recorder(given.lake, run=given.run) as recorder:
        asyncio.run(run(policy, RolloutHook(recorder), given.siblings))
        recorder.close()
        print(f"run {given.run}: {recorder.stats().delivered} episodes recorded, {recorder.stats().troubles} troubles")


if __name__ == "__main__":
    main()
