"""What `trajlake push` finds on disk: weights that engines can read where they are, or what writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from lake.errors import UsageError
from lake.read.snapshot import Snapshot
from lake.storage.atomic import check_whole
from trainer.backends.base import SingleDevice
from trainer.config import OptimizerConfig
from trainer.evaluation.checkpoints import Place, config_of, open_policy
from trainer.policy.model import Policy
from trainer.policy.model_files import lacks_tied, write_model
from trainer.runs.training_run import export_model
from trainer.sync.lora import adapter_writer
from trainer.sync.probe import ProbeConfig, Reference, newest_sequences, random_sequences, score

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Source:
    """A model, a checkpoint or adapters, to be pushed."""

    place: Place
    adapters_only: bool

    @property
    def folder(self) -> Path | None:
        """What engines can read as it is; None if it has to be written first.

        Raises:
            UsageError: adapters are wanted, and the model has none, or lacks files of theirs.
        """
        path = self.place.path
        if self.place.is_checkpoint:
            return None
        if not self.adapters_only:
            return None if path.suffix == ".gguf" or lacks_tied(path) else path
        found = [folder for folder in (path, path / "adapter") if (folder / _ADAPTER).is_file()]
        if not found:
            raise UsageError(f"{path} holds no adapters ({_ADAPTER}); push it without --adapter")
        check_whole(path)
        return found[0]

    @property
    def write(self) -> Callable[[Path], object]:
        """Writes what `folder` lacks into a folder of a given name."""
        if not self.place.is_checkpoint:
            return partial(write_model, self.place.path, tied=True)
        config, backend = config_of(self.place), SingleDevice(self.policy, OptimizerConfig())
        return (
            adapter_writer(backend, config) if self.adapters_only else partial(export_model, backend, config, tied=True)
        )

    @property
    def pushed(self) -> Path:
        """Where what is written goes by default: a folder of the run, or beside the file."""
        path = self.place.path
        return (path.parent.parent if self.place.is_checkpoint else path.parent) / "pushed"

    @cached_property
    def policy(self) -> Policy:
        """The weights in float32, adapters included."""
        return open_policy(self.place, "cpu")[0]

    def reference(self, snapshot: Snapshot | None, probe: ProbeConfig) -> Reference | None:
        """What the trainer says of the lake's newest sequences, or of random ones; None of adapters without a model."""
        if (self.place.path / _ADAPTER).is_file():
            return None
        newest = [] if snapshot is None else newest_sequences(snapshot, self.policy.vocabulary, probe)
        return score(self.policy, newest or random_sequences(self.policy.vocabulary, probe))
