"""A small tabular decision process with known values, and slow, obvious estimators."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lake.statistics import Floats, Ints
from trainer.evaluation.estimators.importance import Turns

STATES, ACTIONS, HORIZON = 3, 2, 4


@dataclass(frozen=True)
class Process:
    """States 0..S-1, two actions, episodes of HORIZON turns or fewer: any turn may be the last."""

    start_S: Floats
    move_SAS: Floats
    reward_SA: Floats
    stop: float
    behaviour_SA: Floats
    target_SA: Floats
    gamma: float

    def value(self, policy_SA: Floats) -> tuple[float, Floats, Floats]:
        """True value of a policy, Q[t, s, a] and V[t, s], by backward induction."""
        q = np.zeros((HORIZON, STATES, ACTIONS))
        v = np.zeros((HORIZON + 1, STATES))
        for t in reversed(range(HORIZON)):
            going_on = (1 - self.stop) * self.gamma
            q[t] = self.reward_SA + going_on * np.einsum("sap,p->sa", self.move_SAS, v[t + 1])
            v[t] = (policy_SA * q[t]).sum(axis=1)
        return float(self.start_S @ v[0]), q, v[:HORIZON]

    def episodes(self, count: int, seed: int, tasks: int = 20) -> tuple[Turns, Ints, Ints]:
        """Episodes of the behaviour policy with their true ratios; states and actions, [E, H]."""
        rng = np.random.default_rng(seed)
        shape = (count, HORIZON)
        log_ratio, reward = np.zeros(shape), np.zeros(shape)
        states, actions = np.full(shape, -1), np.zeros(shape, np.int64)
        length = np.zeros(count, np.int64)
        for e in range(count):
            state = rng.choice(STATES, p=self.start_S)
            for t in range(HORIZON):
                action = rng.choice(ACTIONS, p=self.behaviour_SA[state])
                states[e, t], actions[e, t] = state, action
                log_ratio[e, t] = np.log(self.target_SA[state, action] / self.behaviour_SA[state, action])
                reward[e, t] = self.reward_SA[state, action]
                length[e] = t + 1
                if rng.random() < self.stop:
                    break
                state = rng.choice(STATES, p=self.move_SAS[state, action])
        turns = Turns(log_ratio, reward, length, states, np.arange(count) % tasks, self.gamma)
        return turns, states, actions


def a_process(seed: int = 9, *, gamma: float = 0.9, distance: float = 0.5) -> Process:
    """A random process whose target policy lies between the behaviour policy and another one."""
    rng = np.random.default_rng(seed)
    behaviour = rng.dirichlet(np.full(ACTIONS, 4.0), STATES)
    other_probabilities = rng.dirichlet(np.full(ACTIONS, 1.0), STATES)
    return Process(
        start_S=rng.dirichlet(np.ones(STATES)),
        move_SAS=rng.dirichlet(np.ones(STATES), (STATES, ACTIONS)),
        reward_SA=rng.uniform(0, 1, (STATES, ACTIONS)),
        stop=0.2,
        behaviour_SA=behaviour,
        target_SA=(1 - distance) * behaviour + distance * other_probabilities,
        gamma=gamma,
    )


def turns_of(episodes: list[list[tuple[float, float, int]]], tasks: list[int], gamma: float = 1.0) -> Turns:
    """Episodes given as lists of (log ratio, reward, state)."""
    shape = (len(episodes), max(map(len, episodes)))
    log_ratio, reward, state = np.zeros(shape), np.zeros(shape), np.full(shape, -1)
    for e, turns in enumerate(episodes):
        for t, (ratio, r, s) in enumerate(turns):
            log_ratio[e, t], reward[e, t], state[e, t] = ratio, r, s
    lengths = np.array([len(turns) for turns in episodes])
    return Turns(log_ratio, reward, lengths, state, np.array(tasks), gamma)


def slow(name: str, turns: Turns, *, clip: float = 2.0) -> float:
    """An importance sampling estimate, one episode and one turn after the other."""
    rows: list[dict[str, Any]] = []
    for e in range(turns.episodes):
        weight, products, gain, weighted = 1.0, [], 0.0, 0.0
        for t in range(int(turns.length_E[e])):
            ratio = float(np.exp(turns.log_ratio_EH[e, t]))
            weight *= min(ratio, clip) if name == "clipped" else ratio
            products.append(weight)
            gain += turns.gamma**t * turns.reward_EH[e, t]
            weighted += turns.gamma**t * weight * turns.reward_EH[e, t]
        rows.append({"products": products, "gain": gain, "weighted": weighted, "rewards": turns.reward_EH[e]})
    count = len(rows)
    if name == "behaviour":
        return sum(row["gain"] for row in rows) / count
    if name in ("pdis", "clipped"):
        return sum(row["weighted"] for row in rows) / count
    last = [row["products"][-1] for row in rows]
    if name == "wis":
        return sum(w * row["gain"] for w, row in zip(last, rows, strict=True)) / sum(last)
    total = 0.0
    for t in range(turns.horizon):
        at_t = [row["products"][min(t, len(row["products"]) - 1)] for row in rows]
        at_step = sum(w * row["rewards"][t] for w, row in zip(at_t, rows, strict=True) if t < len(row["products"]))
        total += turns.gamma**t * at_step / sum(at_t)
    return total


# ---------------------------------------------------------------- worlds in which estimates go wrong


def rare_action(
    seed: int, *, episodes: int, behaved: float, target_rate: float, other_reward: float
) -> tuple[Turns, float]:
    """One turn, four actions: the rewarded one has probability `behaved` under the policy that played, `target_rate`
    under the target; the others are rewarded with probability `other_reward`. Returns the truth too."""
    rng = np.random.default_rng(seed)
    behaviour_A = np.array([behaved, *(1 - behaved) * np.array([0.5, 0.3, 0.2])])
    target_A = np.array([target_rate, *(1 - target_rate) * np.array([0.4, 0.3, 0.3])])
    reward_A = np.array([1.0, other_reward, other_reward, other_reward])
    action_E = rng.choice(4, p=behaviour_A, size=episodes)
    turns = Turns(
        np.log(target_A / behaviour_A)[action_E, None],
        (rng.random(episodes) < reward_A[action_E]).astype(np.float64)[:, None],
        np.ones(episodes, np.int64),
        np.zeros((episodes, 1), np.int64),
        np.arange(episodes) % 25,
    )
    return turns, float(target_A @ reward_A)


def hidden_action(
    seed: int,
    *,
    behaved: float = 0.0005,
    target_rate: float = 0.05,
    base: float = 0.02,
    noise: float = 0.3,
    tasks: int = 50,
    siblings: int = 4,
) -> tuple[Turns, float]:
    """One turn: an action of probability `behaved` that the target takes with `target_rate` always succeeds.

    All others succeed with probability `base`; their log-ratios differ by `noise`, which hides that weight is missing.
    Returns the truth too.
    """
    rng = np.random.default_rng(seed)
    behaviour_A = np.array([behaved, *(1 - behaved) * rng.dirichlet(np.full(30, 3.0))])
    other_A = behaviour_A[1:] * np.exp(rng.normal(0.0, noise, 30))
    target_A = np.array([target_rate, *(1 - target_rate) * other_A / other_A.sum()])
    reward_A = np.array([1.0, *np.full(30, base)])
    episodes = tasks * siblings
    action_E = rng.choice(31, p=behaviour_A, size=episodes)
    turns = Turns(
        np.log(target_A / behaviour_A)[action_E, None],
        (rng.random(episodes) < reward_A[action_E]).astype(np.float64)[:, None],
        np.ones(episodes, np.int64),
        np.zeros((episodes, 1), np.int64),
        np.arange(episodes) // siblings,
    )
    return turns, float(target_A @ reward_A)


def history_matters(seed: int, *, episodes: int, turns: int, strength: float) -> tuple[Turns, float]:
    """Every turn looks the same, and the first action decides about the last reward, as far as `strength` goes."""
    rng = np.random.default_rng(seed)
    target_rate = 0.85
    good_EH = rng.random((episodes, turns)) < 0.5
    chance_E = 0.5 * (1 - strength) + strength * good_EH[:, 0]
    reward_EH = np.zeros((episodes, turns))
    reward_EH[:, -1] = rng.random(episodes) < chance_E
    sampled_turns = Turns(
        np.where(good_EH, np.log(target_rate / 0.5), np.log((1 - target_rate) / 0.5)),
        reward_EH,
        np.full(episodes, turns),
        np.zeros((episodes, turns), np.int64),
        np.arange(episodes) % 20,
    )
    return sampled_turns, 0.5 * (1 - strength) + strength * target_rate


def good_actions(seed: int, *, tasks: int = 100, siblings: int = 8) -> tuple[Turns, float]:
    """Four turns of a Markov process per task: the state counts the good actions, and so does the chance of success.

    Returns the truth too. Each state is visited a few times, and its value depends on it alone.
    """
    rng = np.random.default_rng(seed)
    episodes, horizon, target_rate = tasks * siblings, 4, 0.7
    good_EH = rng.random((episodes, horizon)) < 0.5
    count_EH = np.cumsum(good_EH, axis=1)
    task_E = np.arange(episodes) // siblings
    reward_EH = np.zeros((episodes, horizon))
    reward_EH[:, -1] = rng.random(episodes) < count_EH[:, -1] / horizon
    state_EH = task_E[:, None] * (horizon + 1) + count_EH - good_EH
    log_ratio_EH = np.where(good_EH, np.log(target_rate / 0.5), np.log((1 - target_rate) / 0.5))
    return Turns(log_ratio_EH, reward_EH, np.full(episodes, horizon), state_EH, task_E), target_rate


def tasks_that_differ(seed: int, *, tasks: int, siblings: int) -> tuple[Turns, float]:
    """One turn, two actions; how often the better one is rewarded differs from task to task."""
    rng = np.random.default_rng(seed)
    task_E = np.repeat(np.arange(tasks), siblings)
    rate_E = rng.beta(2.0, 2.0, tasks)[task_E]
    good_E = rng.random(tasks * siblings) < 0.5
    reward_E = rng.random(tasks * siblings) < np.where(good_E, rate_E, 0.2)
    log_ratio_E = np.where(good_E, np.log(0.7 / 0.5), np.log(0.3 / 0.5))
    ones = np.ones(tasks * siblings, np.int64)
    turns = Turns(log_ratio_E[:, None], reward_E.astype(np.float64)[:, None], ones, 0 * ones[:, None], task_E)
    return turns, 0.7 * 0.5 + 0.3 * 0.2
