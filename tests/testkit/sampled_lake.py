"""Lakes whose tokens were really sampled by a small model, in a game with known returns.

A task is a seed: it fixes the context of each turn. An action is a few tokens; the reward of a turn is 1 if the sum of
its token ids is divisible by 3, and the game ends early if the first token's id is divisible by 7.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253 - a script that does nothing without it

import lake
from lake import Lake
from lake.records import EpisodeRecord, StepRecord, TokensRecord
from trainer.online.demo import TinyPolicyConfig, save_policy

WORDS = [f"w{number}" for number in range(13)]
CONTEXT, ACTION = 3, 2


def save_model(folder: Path, seed: int = 0) -> Path:
    """A random policy of 16 token ids."""
    save_policy(folder, WORDS, TinyPolicyConfig(initializer_range=0.3), seed)
    return folder


def save_near(folder: Path, model: Path, distance: float, seed: int = 1) -> Path:
    """A policy whose weights are a little off another one's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    near: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in near.parameters():
            if parameter.ndim == 2:
                parameter.add_(distance * torch.randn(parameter.shape, generator=noise))
    near.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def play(
    model: Path, *, tasks: int, siblings: int, turns: int = 2, heat: float = 1.0, seed: int = 0, **tokens: Any
) -> list[EpisodeRecord]:
    """Episodes of a model at a temperature (`heat`); `tokens` overrides what is recorded of the sampling."""
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rng = np.random.default_rng(seed)
    episodes = []
    for task in range(tasks):
        contexts = np.random.default_rng(1000 + task).integers(0, 16, (turns, CONTEXT))
        rollouts = [_Rollout() for _ in range(siblings)]
        for turn in range(turns):
            going = [rollout for rollout in rollouts if not rollout.ended]
            if going:
                _act(policy, going, contexts[turn].tolist(), heat, rng, tokens)
        for index, rollout in enumerate(rollouts):
            episodes.append(
                EpisodeRecord(
                    task_id=f"game{task}",
                    rollout_index=index,
                    seed=task,
                    policy="tiny",
                    policy_version=0,
                    env_return=sum(step.reward or 0.0 for step in rollout.steps),
                    steps=rollout.steps,
                )
            )
    return episodes


def play_warm_and_plain(model: Path) -> list[EpisodeRecord]:
    """Four tasks at temperature 0.7 and five others at 1."""
    warm = play(model, tasks=4, siblings=4, turns=3, heat=0.7, seed=1)
    return warm + [row for row in play(model, tasks=9, siblings=4, turns=3) if int(row.task_id[4:]) >= 4]


class _Rollout:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.steps: list[StepRecord] = []
        self.ended = False


def _act(
    policy: Any,
    rollouts: list[_Rollout],
    context: list[int],
    heat: float,
    rng: np.random.Generator,
    over: dict[str, Any],
) -> None:
    for rollout in rollouts:
        rollout.ids += context
    logprobs: list[list[float]] = [[] for _ in rollouts]
    for _ in range(ACTION):
        ids_BT = torch.tensor([rollout.ids for rollout in rollouts])
        with torch.no_grad():
            logp_BV = (policy(ids_BT).logits[:, -1].float() / heat).log_softmax(-1)
        for row, rollout in enumerate(rollouts):
            share = logp_BV[row].double().exp().numpy()
            token = int(rng.choice(len(share), p=share / share.sum()))
            rollout.ids.append(token)
            logprobs[row].append(float(logp_BV[row, token]))
    for row, rollout in enumerate(rollouts):
        action = rollout.ids[-ACTION:]
        fields: dict[str, Any] = {
            "context_ids": context,
            "action_ids": action,
            "action_logprobs": logprobs[row],
            "temperature": heat,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "logprobs_mode": "processed",
            "policy_version": 0,
        }
        step = StepRecord(
            state=" ".join(map(str, context)),
            action=" ".join(map(str, action)),
            reward=float(sum(action) % 3 == 0),
            policy_version=0,
            tokens=TokensRecord(**(fields | over)),
        )
        rollout.steps.append(step)
        rollout.ended = action[0] % 7 == 0


def recorded(folder: Path, episodes: list[EpisodeRecord], run_id: str = "games") -> Lake:
    """A lake of episodes; recorded into one that is there already, too."""
    lk = lake.open(folder, create=True)
    with lk.job(kind="collect", run_id=run_id) as job:
        job.record(episodes)
    return lk


def one_by_one(model: Path, lk: Lake, *, entropies: bool = False) -> dict[tuple[int, int], list[float]]:
    """Log-probabilities of every action token, or entropies, an episode at a time, by transformers alone."""
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    returns: dict[tuple[int, int], list[float]] = {}
    tokens = lk.scan("tokens").sort("episode_id", "step_index").collect()
    for (episode_id,), rows in tokens.group_by("episode_id", maintain_order=True):
        ids: list[int] = []
        for row in rows.iter_rows(named=True):
            ids += row["context_ids"] + row["action_ids"]
        with torch.no_grad():
            logits_TV = policy(torch.tensor([ids])).logits[0].double()
        at = 0
        for row in rows.iter_rows(named=True):
            at += row["n_context"]
            temperature = row["temperature"] if row["temperature"] else 1.0
            scaled = (logits_TV / temperature).log_softmax(-1)
            returns[episode_id, row["step_index"]] = [
                float(torch.special.entr(scaled[at + n - 1].exp()).sum() if entropies else scaled[at + n - 1, token])
                for n, token in enumerate(row["action_ids"])
            ]
            at += row["n_action"]
    return returns
