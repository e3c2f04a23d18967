"""Why a step of a selected episode carries no loss: the reasons, each spelled once."""

from enum import StrEnum


class Drop(StrEnum):
    """Why a step carries no loss, in order of precedence."""

    NO_TOKENS = "no_tokens"
    """It has no token row in the encoding that is trained on."""
    DEAD_GROUP = "dead_group"
    """All its siblings scored the same (or it has none), so its group says nothing; left out by --live-only."""
    NO_ADVANTAGE = "no_advantage"
    """The credit job gave it no advantage: unscored, excluded, or not covered."""
    INACTIVE = "inactive"
    """Padding after the end of the episode."""
    COPIED_CONTEXT = "copied_context"
    """Repeated from an earlier episode, where it was trained."""
    FILTERED = "filtered"
    """The selection of --selection dropped this step out of an episode that it kept."""
    NOT_TRAINABLE = "not_trainable"
    """Another policy took this decision."""
    STALE = "stale"
    """It was sampled more than `max_staleness` policy versions before the newest one; `unknown_staleness` says what
    becomes of steps of unknown version."""
    NO_ACTION_TOKENS = "no_action_tokens"
    """No token of the action was sampled by the policy."""
    NO_CONTEXT = "no_context"
    """Its action opens a sequence, so nothing predicts its first token."""
    OVER_LENGTH = "over_length"
    """It ends after --max-length tokens of its sequence."""
    UNPAIRED = "unpaired"
    """It, or its episode, is in no pair; the rows `preferences` of --plan say what each condition left."""
    UNLABELLED = "unlabelled"
    """Its episode came out neither well nor badly, or nobody knows how."""
