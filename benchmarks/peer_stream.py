"""One epoch of training batches by another package, out of the token rows that `bench_stream.py` wrote for it.

    PEER_PYTHON benchmarks/peer_stream.py convert NAME --rows rows.npz --folder F
    PEER_PYTHON benchmarks/peer_stream.py read NAME --folder F --workers 2

Runs in the peer's own environment (`peers.py`) and imports nothing of Trajlake. `convert` writes the rows in the peer's
own format. `read` shuffles and batches as the peer's documentation says, with the package's own loader, and pads each
batch to int64 token ids, a loss mask and float32 log-probabilities; it prints rows, tokens and seconds as JSON.
"""

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch  # noqa: TID253 - a script that does nothing without it

SEED = 0
SHARD_ROWS = 10_000
"""Rows of a file where the peer lets us choose: as many as a row group of the lake has."""

Row = dict[str, Any]
Batch = dict[str, torch.Tensor]
Batches = Iterable[Batch]


class Rows:
    """Token rows, each cut out of flat arrays when it is asked for.

    Args:
        path: arrays `ids_T`, `starts_R`, `n_context_R`, `logprobs_A`, `action_starts_R`.
    """

    def __init__(self, path: Path) -> None:
        self._flat = dict(np.load(path))
        self._edges = {name: self._flat[name].tolist() for name in ("starts_R", "action_starts_R", "n_context_R")}

    def __len__(self) -> int:
        return len(self._edges["n_context_R"])

    def __getitem__(self, number: int) -> Row:
        first, last = self._edges["starts_R"][number : number + 2]
        first_action, last_action = self._edges["action_starts_R"][number : number + 2]
        return {
            "ids": self._flat["ids_T"][first:last],
            "n_context": self._edges["n_context_R"][number],
            "logprobs": self._flat["logprobs_A"][first_action:last_action],
        }


def padded(ids_B: Sequence[Any], n_context_B: Any, logprobs_B: Sequence[Any]) -> Batch:
    """A batch of rows of unequal length.

    Args:
        ids_B: token ids of each row, arrays or tensors of int32.
        n_context_B: how many of them are context.
        logprobs_B: log-probabilities of each row's action tokens.
    """
    ids_BL = torch.nn.utils.rnn.pad_sequence([torch.as_tensor(ids) for ids in ids_B], batch_first=True).long()
    lengths_B = torch.tensor([len(ids) for ids in ids_B])
    place_L = torch.arange(ids_BL.shape[1])
    is_action_BL = (place_L >= torch.as_tensor(n_context_B)[:, None]) & (place_L < lengths_B[:, None])
    logprobs = [torch.as_tensor(values) for values in logprobs_B]
    return {
        "ids": ids_BL,
        "is_action": is_action_BL,
        "logprobs": torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True),
        "tokens": lengths_B.sum(),
    }


def collate(rows: Sequence[Row]) -> Batch:
    """A batch of single rows."""
    return padded([row["ids"] for row in rows], [int(row["n_context"]) for row in rows], [r["logprobs"] for r in rows])


def convert_datasets(rows: Rows, folder: Path) -> None:
    """An Arrow data set on disk, in shards."""
    datasets = importlib.import_module("datasets")
    features = datasets.Features(
        {
            "ids": datasets.List(datasets.Value("int32")),
            "n_context": datasets.Value("int32"),
            "logprobs": datasets.List(datasets.Value("float32")),
        }
    )
    made = datasets.Dataset.from_generator(
        lambda: (rows[number] for number in range(len(rows))), features=features, cache_dir=str(folder / "cache")
    )
    made.save_to_disk(str(folder / "arrow"), num_shards=-(-len(rows) // SHARD_ROWS))


def read_datasets(folder: Path, batch: int, workers: int) -> Batches:
    """Torch format, whole batches at a time, which is the fastest that it has for ragged rows.

    In process an iterable data set, shuffled by shard and by buffer; with workers a map of random access, which torch's
    loader deals out.
    """
    datasets = importlib.import_module("datasets")
    made = datasets.load_from_disk(str(folder / "arrow"))
    if workers:
        return torch.utils.data.DataLoader(
            made.with_format("torch"), batch_size=batch, shuffle=True, num_workers=workers, collate_fn=collate
        )
    stream = made.to_iterable_dataset(num_shards=-(-len(made) // SHARD_ROWS))
    stream = stream.shuffle(seed=SEED, buffer_size=SHARD_ROWS).with_format("torch")
    return (padded(rows["ids"], rows["n_context"], rows["logprobs"]) for rows in stream.iter(batch))


def convert_litdata(rows: Rows, folder: Path) -> None:
    """litdata's chunks of its default size."""
    litdata = importlib.import_module("litdata")
    litdata.optimize(
        fn=rows.__getitem__,
        inputs=list(range(len(rows))),
        output_dir=str(folder / "lit"),
        chunk_bytes="64MB",
        num_workers=1,
    )


def read_litdata(folder: Path, batch: int, workers: int) -> Batches:
    """Its own data set and loader."""
    litdata = importlib.import_module("litdata")
    made = litdata.StreamingDataset(str(folder / "lit"), shuffle=True, seed=SEED)
    loader: Batches = litdata.StreamingDataLoader(made, batch_size=batch, num_workers=workers, collate_fn=collate)
    return loader


def _streaming() -> ModuleType:
    """mosaicml-streaming, whose vision sets want torchvision at import: nothing here uses it."""

    class Stub(ModuleType):
        def __getattr__(self, name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return object

    importlib.import_module("transformers")  # looks for torchvision itself, and must find that there is none
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = Stub(name)
    return importlib.import_module("streaming")


def convert_streaming(rows: Rows, folder: Path) -> None:
    """MDS shards of the default size."""
    columns = {"ids": "ndarray:int32", "n_context": "int", "logprobs": "ndarray:float32"}
    with _streaming().MDSWriter(out=str(folder / "mds"), columns=columns) as writer:
        for number in range(len(rows)):
            writer.write(rows[number])


def read_streaming(folder: Path, batch: int, workers: int) -> Batches:
    """Its own data set in torch's loader."""
    made = _streaming().StreamingDataset(
        local=str(folder / "mds"), shuffle=True, shuffle_seed=SEED, batch_size=batch, num_canonical_nodes=1
    )
    return torch.utils.data.DataLoader(made, batch_size=batch, num_workers=workers, collate_fn=collate)


PEERS: dict[str, tuple[Callable[[Rows, Path], None], Callable[[Path, int, int], Batches]]] = {
    "datasets": (convert_datasets, read_datasets),
    "litdata": (convert_litdata, read_litdata),
    "mosaicml-streaming": (convert_streaming, read_streaming),
}


def read(batches: Batches, seconds: float, began: float) -> dict[str, float]:
    """What comes in so many seconds, or in one epoch if that is shorter."""
    rows = tokens = 0
    for batch in _until(batches, began + seconds):
        rows += len(batch["ids"])
        tokens += int(batch["tokens"])
    return {"rows": rows, "tokens": tokens, "seconds": time.perf_counter() - began}


def _until(batches: Batches, deadline: float) -> Iterator[Batch]:
    for batch in batches:
        yield batch
        if time.perf_counter() > deadline:
            return


def main() -> None:
    """Convert or read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("convert", "read"))
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=82)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    convert, batches_of = PEERS[options.peer]
    torch.set_num_threads(1)
    if options.what == "convert":
        convert(Rows(options.rows), options.folder)
        return
    module = _streaming() if options.peer == "mosaicml-streaming" else importlib.import_module(options.peer)
    assert module
    began = time.perf_counter()
    print(json.dumps(read(batches_of(options.folder, options.batch, options.workers), options.seconds, began)))


if __name__ == "__main__":
    main()
