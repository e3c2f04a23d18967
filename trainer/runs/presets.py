"""Configurations by purpose, as functions: what a researcher would set for a method, and nothing else.

Each returns a TrainConfig (or the stages of one run), which `trainer.runs.offline.train` (or `train_stages` in
`trainer.runs.stages`) takes. `model` is a model folder; losses on preferences also compare with it, unless `reference`
names another. `beta` says how strongly that reference holds. Keyword arguments set any other field; a mapping is merged
with what the preset sets.
"""

from typing import Any

from lake.judgements.predicates import bracketed
from trainer.config import TrainConfig
from trainer.runs.stages import Stage
from trainer.train_settings import layered

PREFERENCE_LEARNING_RATE = 1e-6
"""Peak for losses on preferences: TRL's default for DPO and KTO, and that of the DPO paper, for models of a billion
parameters and more. Below, pass a larger learning_rate."""


def sft(model: str, **fields: Any) -> TrainConfig:
    """The likelihood of the recorded actions."""
    return _configured(model, "sft", {}, fields)


def filtered_bc(model: str, threshold: float = 1.0, **fields: Any) -> TrainConfig:
    """Behaviour cloning of episodes whose `env_return` reaches a threshold (RFT, arXiv 2308.01825)."""
    reached = f"env_return >= {float(threshold)!r}"
    where = fields.pop("where", None)
    return sft(model, where=f"{bracketed(where, 'where')} AND {reached}" if where else reached, **fields)


def awr(model: str, beta: float = 1.0, **fields: Any) -> TrainConfig:
    """Advantage-weighted regression on live groups (arXiv 1910.00177); beta is in their standard deviations."""
    return _configured(model, "awr", {"beta": beta}, fields)


def dpo(model: str, beta: float = 0.1, **fields: Any) -> TrainConfig:
    """Better sibling episodes preferred to worse ones, whole trajectory against whole trajectory.

    beta and the learning rate as in the paper (Rafailov et al. 2023, arXiv 2305.18290, appendix B) and in TRL; on
    trajectories of agents: ETO (Song et al. 2024, arXiv 2403.02502).
    """
    return _preferring(model, "dpo", {"beta": beta}, fields)


def step_dpo(model: str, beta: float = 0.1, margin: float = 0.0, *, graft: bool = False, **fields: Any) -> TrainConfig:
    """Better actions preferred to worse ones at the same anchor (step-DPO, Lai et al. 2024, arXiv 2406.18629).

    The paper compares a right step with a wrong one after the same beginning; here anchors and returns-to-go of a
    credit job say which are compared. `margin` is the smallest difference of two returns-to-go (equal ones are never
    paired); `graft` puts both actions onto the chosen one's context where the contexts differ.
    """
    pairs = {"kind": "step", "margin": margin, "graft": graft}
    return _preferring(model, "dpo", {"beta": beta, "pairs": pairs}, fields)


def dmpo(model: str, beta: float = 0.1, gamma: float = 0.7, **fields: Any) -> TrainConfig:
    """As `dpo`, but early turns count more, and length does not (Shi et al. 2024, arXiv 2406.14868).

    gamma is the discount from turn to turn; 1 weighs them linearly. beta and gamma as in the authors' code.
    """
    return _preferring(model, "dmpo", {"beta": beta, "gamma": gamma}, fields)


def kto(model: str, beta: float = 0.1, threshold: float | None = None, **fields: Any) -> TrainConfig:
    """Good episodes made likelier and bad ones less likely, without pairs (Ethayarajh et al. 2024, arXiv 2402.01306).

    An episode is good from an `env_return` of `threshold` on; None takes the sign of A_E of the credit job. beta and
    both weights (1) as in the paper and in TRL. Where there are many more of one kind, its weight should be lower
    (`loss={"desirable_weight": ...}`), so that weight times number is about the same for both.
    """
    return _preferring(model, "kto", {"beta": beta, "threshold": threshold}, fields)


def sft_then_rl(model: str, rl: TrainConfig, *, where: str = "env_return > 0", **fields: Any) -> list[Stage]:
    """Imitate the episodes of `where`, then learn from advantages (`rl`), starting from those weights."""
    first = sft(model, where=where, **fields)
    return [Stage("sft", first, follows=False), Stage("rl", rl, follows=True)]


def _preferring(model: str, loss: str, options: dict[str, Any], fields: dict[str, Any]) -> TrainConfig:
    return _configured(model, loss, options, {"learning_rate": PREFERENCE_LEARNING_RATE} | fields)


def _configured(model: str, loss: str, options: dict[str, Any], fields: dict[str, Any]) -> TrainConfig:
    return TrainConfig.model_validate(layered({"model": model, "loss": {"name": loss, **options}}, fields))
