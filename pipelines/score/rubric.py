"""Rubric agreement: how near a generated rubric's scores are to those of the rubric it should have been."""

from typing import Literal

from pipelines.score.reward_definition import Component, RewardDefinition


def rubric_agreement(
    name: str = "rubric_agreement",
    *,
    generated: str = "generated_rubric",
    true: str = "true_rubric",
    distance: Literal["squared", "absolute"] = "squared",
    terms: str | None = None,
    terms_weight: float = 0.1,
) -> RewardDefinition:
    """The reward of a policy that writes rubrics: -(g - t)^2 or -|g - t|, plus what its rubric looks like.

    g and t are scores of the same outputs under the generated and the true rubric, by two scorers (LLM judges, say).

    Args:
        name: of the reward.
        generated: scorer (or scorer@version) that applies the generated rubric.
        true: scorer that applies the true one.
        distance: which of the two.
        terms: scorer of quality, efficiency and coverage (`rubric_terms`); None leaves them out.
        terms_weight: its weight.
    """
    agreement = "-power(generated - true_score, 2)" if distance == "squared" else "-abs(generated - true_score)"
    components = [Component(scorer=generated, name="generated"), Component(scorer=true, name="true_score")]
    if terms is not None:
        components.append(Component(scorer=terms, name="terms"))
        agreement += f" + {terms_weight!r} * terms"
    return RewardDefinition(name=name, components=tuple(components), sql=agreement)
