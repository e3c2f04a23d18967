"""The weights of an online run as whoever plays them gets them: a folder for each version.

A version is the number of rounds that were trained on. Engines read the folder that the policy in this process reads.
"""

import shutil
from pathlib import Path

from lake.errors import CheckpointError, UsageError
from lake.storage.atomic import atomic_folder, check_whole, recover, remove_folder
from pipelines.collect.wiring import PlayedWeights
from trainer.backends.base import SingleDevice
from trainer.config import TrainConfig
from trainer.runs.training_run import export_model


class Versions:
    """The folders `v0`, `v1`, ... of a run.

    Args:
        folder: of these folders; nobody else may be writing there.
        config: of the training run.
    """

    def __init__(self, folder: Path, config: TrainConfig) -> None:
        recover(folder)
        self._folder = folder
        self._config = config

    def place(self, version: int) -> Path:
        """Where a version lies."""
        return (self._folder / f"v{version}").absolute()

    def played(self, version: int) -> PlayedWeights:
        """A version for a player. Raises CheckpointError: its folder is gone, or lacks files."""
        place = self.place(version)
        if not place.is_dir():
            raise CheckpointError(
                f"{place} is gone, with the weights that the next rollouts are to be played by; restore it, or start "
                "another run into another --out"
            )
        try:
            check_whole(place)
        except UsageError as error:
            raise CheckpointError(f"{error}; or start another run into another --out") from error
        return PlayedWeights(place, version)

    def write(self, backend: SingleDevice, version: int) -> None:
        """Write the policy's weights as they are now, in place of what is there.

        A resumed run does it with the weights of its checkpoint, which are verified: a folder is not.
        """
        # vLLM on a CPU keeps its old head unless tied weights are there by every name.
        export_model(backend, self._config, self.place(version), tied=True)

    def copy(self, version: int, target: Path) -> None:
        """Put a version into another folder, in place of what is there."""
        with atomic_folder(target) as partial:
            shutil.copytree(self.played(version).folder, partial, dirs_exist_ok=True)

    def prune(self, first: int) -> None:
        """Remove versions that nobody plays again: those before `first`."""
        for place in self._folder.glob("v*"):
            number = place.name.removeprefix("v")
            if number.isdecimal() and int(number) < first:  # a copy that somebody made, `v3.old`, is not ours
                remove_folder(place)
