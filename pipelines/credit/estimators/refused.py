"""Estimators that are asked for and not offered: each with the reason and with what to use in its place."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """An estimator this project does not offer."""

    reason: str
    """Why not."""
    instead: str
    """What to use."""


_TOKEN_GAE = Refusal(
    reason="a value per token needs a critic's forward pass over every token, which no lake stores; credit is computed "
    "from tables, one row per step",
    instead="`gae` works on turns: one stored value per step (steps.value_estimate) and one for the final observation",
)
_TOKEN_KL = Refusal(
    reason="a KL term per token depends on the weights being trained and on the reference, so it is part of the loss, "
    "not of a stored advantage",
    instead="for KL in the reward, the step scorer `kl_in_reward` over the table `ratios` (the k1 estimate, summed "
    "over an action's tokens), as a component of a reward; for KL in the loss, the trainer's loss",
)

REFUSED: dict[str, Refusal] = {
    "token_gae": _TOKEN_GAE,
    "ppo": _TOKEN_GAE,
    "token_kl": _TOKEN_KL,
    "kl": _TOKEN_KL,
}
"""Name -> why it is refused."""
