"""Lock-step generation on a shared key-value cache.

Each call feeds only new tokens, as one left-padded chunk on top of the cache; rows that have ended are cut out. The
cache has holes where shorter chunks were padded: the attention mask covers them and positions count real tokens only,
so every row sees exactly the sequence that a plain forward pass over its tokens sees.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class CachedBatch:
    """The cache of `rows` sequences that grow together."""

    def __init__(self, model: "PreTrainedModel", rows: int) -> None:
        import torch
        from transformers import DynamicCache

        self._model = model
        self._rows = list(range(rows))
        self._cache = DynamicCache(config=model.config)
        self._mask_BT = torch.zeros((rows, 0), dtype=torch.long, device=model.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only, in this order."""
        if list(rows) == self._rows:
            return
        import torch

        place = {row: index for index, row in enumerate(self._rows)}
        index_B = torch.tensor([place[row] for row in rows], device=self._model.device)
        if self._mask_BT.shape[1]:
            self._cache.batch_select_indices(index_B)
        self._mask_BT = self._mask_BT[index_B]
        self._rows = list(rows)

    def extend(self, chunk_B: Sequence[Sequence[int]]) -> "torch.Tensor":
        """Append tokens to every row; an empty chunk leaves its row as it is.

        Returns:
            Logits `_BV` after each row's last token; meaningless for rows with an empty chunk.
        """
        import torch

        width = max(map(len, chunk_B))
        # Masks come from lengths: the padding id is a real token's and means nothing here.
        padded = [[0] * (width - len(chunk)) + list(chunk) for chunk in chunk_B]
        fresh = [[0] * (width - len(chunk)) + [1] * len(chunk) for chunk in chunk_B]
        fresh_BT = torch.tensor(fresh, device=self._model.device)
        before_B = self._mask_BT.sum(1, keepdim=True)
        self._mask_BT = torch.cat([self._mask_BT, fresh_BT], dim=1)
        output = self._model(
            input_ids=torch.tensor(padded, device=self._model.device),
            attention_mask=self._mask_BT,
            position_ids=(before_B + fresh_BT.cumsum(1) - 1).clamp(min=0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV
