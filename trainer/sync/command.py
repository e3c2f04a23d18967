"""Command `push`: the weights of a model or a training run into running engines."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lake.errors import UsageError

if TYPE_CHECKING:
    from lake.lake import Lake
    from pipelines.collect.engines import Engine
    from trainer.sync import Delivery, Push
    from trainer.sync.fleet import Fleet
    from trainer.sync.probe import ProbeConfig, Reference
    from trainer.sync.source import Source


@click.command()
@click.argument("model")
@click.option("--engine", "urls", required=True, multiple=True, metavar="URL", help="A running engine; repeatable.")
@click.option("--version", type=click.IntRange(min=0), help="Version of the weights.  [default: as told above]")
@click.option("--again", is_flag=True, help="The weights are those that had --version before; it need not rise.")
@click.option("--adapter", metavar="NAME", help="Push the LoRA adapters alone; requests call them NAME-vVERSION.")
@click.option("--folder", type=click.Path(path_type=Path), help="For what must be written.  [default: RUN/pushed]")
@click.option("--probe/--no-probe", default=True, show_default=True, help="Compare log-probabilities afterwards.")
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Largest difference allowed, in nats.  [default: 1e-4 in float32, else 0.1 on average]",
)
@click.option("--lake", "lake_uri", envvar="TRAJLAKE_LAKE", show_envvar=True, help="Lake to probe with and to note it.")
@click.option("--watch", is_flag=True, help="Stay, and give the weights again to an engine that was restarted.")
def push(
    model: str,
    urls: Sequence[str],
    version: int | None,
    again: bool,
    adapter: str | None,
    folder: Path | None,
    probe: bool,
    limit: float | None,
    lake_uri: str | None,
    watch: bool,
) -> None:
    """Load weights into running engines, all at once, while they generate.

    MODEL is a model's folder, a run's or a checkpoint's, a .gguf file, or with --lake RUN[@STEP]. A model's folder is
    read where it lies, unless its head is tied to its embedding; anything else is written as one first. Engines find it
    at the same path as this machine.

    Versions rise: one more than the engines have, and than the lake has seen with --lake; or the number of updates that
    made the weights, where that is more.
    A line per engine says what came of it. The exit status is 1 if one did not take the weights, or disagrees with the
    trainer about the log-probabilities of fixed tokens (the lake's newest, or random ones).
    """
    import lake
    from lake.cli.options import quiet
    from pipelines.collect.engines.find import engine_at
    from trainer.commands import file_faults
    from trainer.sync.probe import ProbeConfig

    quiet()
    if again and version is None:
        raise UsageError("--again needs --version: the one that these weights had before")
    lk = None if lake_uri is None else lake.open(lake_uri)
    source = _source(model, lk, adapters_only=adapter is not None)
    config = ProbeConfig(limit=limit)
    engines = [engine_at(url) for url in urls]
    if len({engine.url for engine in engines}) < len(engines):
        raise UsageError(f"an engine is named twice: {', '.join(engine.url for engine in engines)}")
    with file_faults():
        reference = source.reference(None if lk is None else lk.snapshot(), config) if probe else None
        failed = asyncio.run(
            _run(
                engines,
                source,
                reference,
                config,
                version=version,
                again=again,
                adapter=adapter,
                folder=folder,
                lk=lk,
                watch=watch,
            )
        )
    if failed:
        sys.exit(1)


def _source(model: str, lk: "Lake | None", *, adapters_only: bool) -> "Source":
    from lake.storage.atomic import settled
    from trainer.evaluation.checkpoints import find_checkpoint, found_on_disk
    from trainer.sync.source import Source

    if lk is not None:
        return Source(find_checkpoint(lk.snapshot(), model), adapters_only)
    if not settled(Path(model)).exists():
        raise UsageError(f"there is no {model}; give the folder of a model or a run, or --lake and RUN[@STEP]")
    return Source(found_on_disk(Path(model)), adapters_only)


async def _run(
    engines: Sequence["Engine"],
    source: "Source",
    reference: "Reference | None",
    config: "ProbeConfig",
    *,
    version: int | None,
    again: bool,
    adapter: str | None,
    folder: Path | None,
    lk: "Lake | None",
    watch: bool,
) -> bool:
    """Push, say and note what came of it, and stay if asked to; whether an engine failed."""
    from trainer.sync.fleet import Fleet

    try:
        fleet = Fleet(engines, config)
        if version is None:
            number = await _next_version(source, engines, lk)
        else:
            number = version
            if not again and adapter is None:
                await _refuse_older(version, engines)
        done = await _pushed(fleet, source, reference, number, adapter, folder)
        for delivery in done.deliveries:
            click.echo(_line(delivery, done.version))
        if lk is not None:
            _note(
                lk,
                done,
                {"model": str(source.place.path), "engines": [engine.url for engine in engines], "adapter": adapter},
            )
        if watch:
            await fleet.watch(click.echo)
        return bool(done.failed)
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


async def _next_version(source: "Source", engines: Sequence["Engine"], lk: "Lake | None") -> int:
    """Above all that are known, so that no other weights had it: a run's updates alone begin anew with every run."""
    known = [await engine.newest_version() for engine in engines]
    if lk is not None:
        known += _versions_seen(lk)
    above = 1 + max((version for version in known if version is not None), default=0)
    return max(above, source.place.policy_version or 0)


def _versions_seen(lk: "Lake") -> list[int | None]:
    """The newest versions that sampled tokens of the lake have, and that were pushed with it."""
    rows = lk.sql(
        "SELECT max(policy_version) FROM tokens UNION ALL "
        "SELECT max(TRY_CAST(json_extract_string(parameters, '$.version') AS BIGINT)) FROM job_runs WHERE kind = 'push'"
    )
    return [version for (version,) in rows.iter_rows()]


async def _refuse_older(version: int, engines: Sequence["Engine"]) -> None:
    """Raise UsageError: an engine has that version already, or was given a newer one."""
    for engine in engines:
        newest, has = await engine.newest_version(), await engine.version()
        free = 0 if newest is None else newest + (has == newest)  # one that it could not load is nobody's yet
        if version < free:
            raise UsageError(
                f"{engine.url} was given version {newest} already, and one version means one set of weights: give "
                f"--version {free} or more, none at all, or --again if these are the weights that version {version} had"
            )


async def _pushed(
    fleet: "Fleet",
    source: "Source",
    reference: "Reference | None",
    version: int,
    adapter: str | None,
    folder: Path | None,
) -> "Push":
    from trainer.sync import Weights
    from trainer.sync.disk import DiskSync
    from trainer.sync.lora import adapter_name

    if source.folder is not None:
        name = None if adapter is None else adapter_name(adapter, version)
        return await fleet.deliver(Weights(version=version, folder=source.folder.absolute(), adapter=name), reference)
    sync = DiskSync(
        fleet,
        source.write,
        folder or source.pushed,
        reference=None if reference is None else lambda: reference,
        adapter=None if adapter is None else partial(adapter_name, adapter),
    )
    await sync.push(version)
    done = await sync.wait()
    assert done is not None
    return done


def _note(lk: "Lake", done: "Push", parameters: dict[str, object]) -> None:
    """A job with its metrics, at the version as their step."""
    from trainer.runs.metrics import metrics_frame

    held = {delivery.url: delivery.after for delivery in done.deliveries}
    with lk.job(kind="push", parameters=parameters | {"version": done.version, "versions": held}) as job:
        job.write("metrics", metrics_frame([(done.version, done.metrics())]))
        job.counts |= {"engines": len(done.deliveries), "failed": len(done.failed)}


def _line(delivery: "Delivery", version: int) -> str:
    before = "none" if delivery.before is None else f"{delivery.before}"
    if delivery.error is None:
        said = "" if delivery.parity is None else f"; {delivery.parity}"
        return f"{delivery.url}: version {before} -> {version} in {delivery.seconds:.2f} s{said}"
    if delivery.after == version != delivery.before:
        return f"{delivery.url}: version {before} -> {version}, and not to be used: {delivery.error}"
    has = "unknown" if delivery.after is None else f"{delivery.after}"
    had = before if delivery.after == delivery.before else f"{before} -> {has}"
    return f"{delivery.url}: version {had}, not {version}: {delivery.error}"
