"""Anchor states: which steps of sibling trajectories count as "the same place".

A definition gives every step a key; steps of one task group with equal keys form an anchor group. Keys are 63-bit
hashes, stable across processes and machines, never Python's equality (where 1 == 1.0 == True). A NULL key is an unknown
state. One small file per definition; docs/guides/which-anchor.md says which to choose.
"""

from typing import Annotated, TypeAlias

from pydantic import Field

from pipelines.credit.anchors import (
    chain,
    chosen_columns,
    definition,
    history,
    json_text,
    similar,
    states,
    texts,
    user_function,
)
from pipelines.credit.anchors.chain import Chain, Single
from pipelines.credit.anchors.chosen_columns import ChosenColumns
from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.history import LastStates, history_keys
from pipelines.credit.anchors.json_text import CanonicalJson
from pipelines.credit.anchors.similar import SimilarText
from pipelines.credit.anchors.texts import ExactText, NoErrors, Substitution, Substitutions, ToolResults
from pipelines.credit.anchors.user_function import UserFunction

__all__ = [
    "MODULES",
    "Anchors",
    "CanonicalJson",
    "Chain",
    "ChosenColumns",
    "Definition",
    "ExactText",
    "LastStates",
    "NoErrors",
    "SimilarText",
    "Substitution",
    "Substitutions",
    "ToolResults",
    "UserFunction",
    "history_keys",
]

Anchors: TypeAlias = Annotated[Chain | Single, Field(discriminator="kind")]
"""An anchor definition; as JSON for example `{"kind": "exact"}` or `{"kind": "similarity", "threshold": 0.9}`."""

MODULES = (definition, states, texts, json_text, chosen_columns, history, similar, user_function, chain)
"""Modules whose source decides the keys: part of a credit job's code."""
