"""Similarity: steps whose texts difflib finds close enough, as the authors' code does it."""

from typing import ClassVar, Literal

import polars as pl
from pydantic import Field

from pipelines.credit.anchors.definition import Definition
from pipelines.credit.anchors.states import States, hash_texts
from pipelines.credit.similarity import cluster_representatives


class SimilarText(Definition):
    """Two steps share an anchor if greedy clustering by difflib's ratio puts their texts together.

    Inside a task group, steps are visited by (episode_id, step_index); see `similarity.py`. The key is the hash of the
    cluster's first text. Slow: every distinct text of a group is compared with the clusters so far.
    """

    kind: Literal["similarity"] = "similarity"
    """Name of the definition."""
    threshold: float = Field(default=0.95, gt=0.0, le=1.0)
    """Smallest `difflib.SequenceMatcher(None, text, first_member).ratio()` that joins a cluster."""
    makes_key: ClassVar[bool] = True

    @property
    def reads_text(self) -> bool:
        """Texts are compared."""
        return True

    def apply(self, states: States) -> States:
        """Keys of the clusters; NULL also for rows that take no part, and so open no cluster."""
        rows = pl.DataFrame({"group": states.batch.groups.ids_N(), "code": states.codes_N})
        taking_part = rows.filter(pl.Series(states.included_N)).unique(maintain_order=True)
        visited = taking_part.join(states.texts().drop_nulls(), on="code", how="inner", maintain_order="left")
        firsts: list[str] = []
        for texts in visited.group_by("group", maintain_order=True).agg("text")["text"]:
            first_text = cluster_representatives(texts, self.threshold)
            firsts.extend(first_text[text] for text in texts)
        keys = hash_texts(pl.Series(firsts, dtype=pl.String)).alias("key")
        table = visited.select("group", "code").with_columns(keys)
        found = rows.join(table, on=["group", "code"], how="left", maintain_order="left")["key"]
        return states.keyed(found).kept(pl.Series(states.included_N))
