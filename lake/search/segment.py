"""A segment: which words stand in which rows of some data files, as arrays.

Equal texts are one document however many rows have them, because agents' texts repeat: a system prompt, a tool's
result, a state that siblings share. Words point to documents, documents to rows, rows to an episode and a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from lake.search import words

Numbers = npt.NDArray[Any]
EPISODE = -1
"""The step of texts that belong to the whole episode."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Sizes: V words, P places of words in documents, D documents, M places of documents in rows, R rows."""

    vocabulary: str
    """V words in order, each between two line breaks."""
    count_V: Numbers
    """Documents of each word: uint32."""
    document_P: Numbers
    """The documents of the words, word after word, rising in each: uint32."""
    count_D: Numbers
    """Rows of each document: uint16."""
    row_M: Numbers
    """The rows of the documents, document after document: uint16."""
    episode_R: Numbers
    """Episode ids: int64."""
    step_R: Numbers
    """Step indices, `EPISODE` for texts of the whole episode: int32."""

    @classmethod
    def of(cls, rows: pl.DataFrame, columns: Sequence[str], documents: Sequence[str]) -> "Segment":
        """The segment of rows.

        Args:
            rows: episode_id, step_index, and the columns with texts.
            columns: plain texts.
            documents: JSON documents.
        """
        said = [rows.select(pl.int_range(pl.len(), dtype=pl.UInt32).alias("row"), text=name) for name in columns]
        said += [_said(rows[name]) for name in documents]
        pairs = pl.concat(said).drop_nulls().filter(pl.col("text") != "")
        texts = pairs["text"].unique(maintain_order=True)
        numbers = pl.DataFrame({"text": texts, "document": pl.int_range(len(texts), dtype=pl.UInt32, eager=True)})
        pairs = pairs.join(numbers, on="text").select("document", "row").unique().sort("document", "row")
        of_words = (
            numbers.select("document", word=words.in_texts(words.readable(numbers["text"])).list.unique())
            .explode("word", empty_as_null=False, keep_nulls=False)
            .group_by("word")
            .agg(pl.col("document").sort())
            .sort("word")
        )
        return cls(
            vocabulary="\n" + "".join(f"{word}\n" for word in of_words["word"]),
            count_V=of_words["document"].list.len().to_numpy(),
            document_P=of_words["document"].explode(empty_as_null=False, keep_nulls=False).to_numpy(),
            count_D=np.bincount(pairs["document"].to_numpy(), minlength=len(texts)).astype(np.uint16),
            row_M=pairs["row"].cast(pl.UInt16).to_numpy(),
            episode_R=rows["episode_id"].to_numpy(),
            step_R=rows["step_index"].cast(pl.Int32).to_numpy(),
        )


def _said(documents: pl.Series) -> pl.DataFrame:
    """row, text: what JSON documents say, each distinct one read once."""
    numbered = documents.to_frame("document").with_row_index("row")
    distinct = documents.drop_nulls().unique()
    said = pl.Series([words.document(text) for text in distinct], dtype=pl.String)
    known = pl.DataFrame({"document": distinct, "text": said})
    return numbered.join(known, on="document").select("row", "text")
