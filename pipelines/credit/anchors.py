"""Anchor states: which steps of sibling trajectories count as "the same place".

A definition gives every step a key; steps of one task group with equal keys form an anchor group. Keys are 63-bit
hashes of text, stable across processes and machines, never Python's equality (where 1 == 1.0 == True).
"""

from typing import Annotated, Literal, TypeAlias

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from lake.ids import text_hash
from pipelines.credit.batch import StepBatch
from pipelines.credit.segments import Bools
from pipelines.credit.similarity import cluster_representatives


class ExactText(BaseModel):
    """Two steps share an anchor if their state texts are equal, character for character."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["exact"] = "exact"
    """Name of the definition."""

    def columns(self, present: list[str]) -> tuple[str, ...]:
        """Input columns: the stored hash where there is one, so that no text is read; else the text."""
        return ("state_hash",) if "state_hash" in present else ("state",)

    def keys(self, batch: StepBatch, _included_N: Bools) -> pl.Series:
        """Key of each row: `state_hash`, or the hash of `state`; NULL where that is NULL.

        Args:
            batch: rows in canonical order.

        Returns:
            Int64 series over the rows.
        """
        if "state_hash" in batch.frame.columns:
            return batch.frame["state_hash"].cast(pl.Int64)
        return _hash_texts(batch.frame["state"])


class SimilarText(BaseModel):
    """Two steps share an anchor if greedy clustering by difflib's ratio puts their texts together.

    Inside a task group, steps are visited by (episode_id, step_index); see `similarity.py`. The key is the hash of the
    cluster's first text. Slow: seconds per thousand distinct texts of a group.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["similarity"] = "similarity"
    """Name of the definition."""
    threshold: float = Field(default=0.95, gt=0.0, le=1.0)
    """Smallest `difflib.SequenceMatcher(None, text, first_member).ratio()` that joins a cluster."""

    def columns(self, _present: list[str]) -> tuple[str, ...]:
        """Input columns: the text."""
        return ("state",)

    def keys(self, batch: StepBatch, included_N: Bools) -> pl.Series:
        """Key of each row; NULL where `state` is NULL, and for rows that take no part and so open no cluster.

        Args:
            batch: rows in canonical order.
            included_N: rows whose episode takes part.

        Returns:
            Int64 series over the rows.
        """
        states = batch.frame.select(pl.when(pl.Series(included_N)).then("state").alias("state")).to_series()
        first_texts: list[str | None] = []
        for start, length in zip(batch.groups.starts_K.tolist(), batch.groups.lengths_K.tolist(), strict=True):
            texts = states.slice(start, length).to_list()
            first_text = cluster_representatives((text for text in texts if text is not None), self.threshold)
            first_texts.extend(None if text is None else first_text[text] for text in texts)
        return _hash_texts(pl.Series("state", first_texts, dtype=pl.String))


Anchors: TypeAlias = Annotated[ExactText | SimilarText, Field(discriminator="kind")]
"""An anchor definition; as JSON `{"kind": "exact"}` or `{"kind": "similarity", "threshold": 0.9}`."""


def _hash_texts(texts: pl.Series) -> pl.Series:
    """63-bit hash of each text, computed once per distinct text."""
    distinct = texts.drop_nulls().unique()
    hashes = pl.Series("anchor_key", map(text_hash, distinct), dtype=pl.Int64)
    table = pl.DataFrame({texts.name: distinct, "anchor_key": hashes})
    return texts.to_frame().join(table, on=texts.name, how="left", maintain_order="left")["anchor_key"]
