"""Command `page`: an episode, or the siblings of a group, as one HTML file to send.

It is no format of `trajlake export`: that writes rows for programs, in shards with a manifest, and knows no viewer.
"""

from functools import partial
from pathlib import Path

import click

from lake.cli.options import Lakes, lakes_option
from lake.errors import UsageError


@click.command()
@lakes_option
@click.argument("wanted", metavar="EPISODE|GROUP")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The file to write.")
@click.option("--credit", help="Whose advantages.  [default: the current ones]")
def page(lake_uri: Lakes, wanted: str, out: Path, credit: str | None) -> None:
    """Write an episode, or the siblings of a group, as one HTML file.

    It opens in any browser, without a server, and asks nothing of the network.
    """
    import lake

    _quiet()
    from viewer.pinned import Reader
    from viewer.queries import training
    from viewer.transcript import page as made
    from viewer.transcript.route import ask
    from viewer.transcript.told import Read

    read: Read = partial(ask, Reader(lake.open(lake_uri).snapshot()))
    named = read(training.credit_named, credit)
    if credit is not None and named is None:
        raise UsageError(f"{credit!r} names no credit; write an estimator's name, or the id of a series or job")
    chosen = None if named is None else named.text
    for kind in ({"episode": wanted, "group": None}, {"episode": None, "group": wanted}):
        try:
            found = made.of(read, chosen, **kind)
        except (LookupError, ValueError):
            continue
        out.write_bytes(made.html(found))
        click.echo(f"{out}: {len(found)} episode{'s' if len(found) > 1 else ''}, {out.stat().st_size:,} bytes")
        return
    raise UsageError(f"{wanted!r} is the id of no episode and of no group; `trajlake sql` lists them")


def _quiet() -> None:
    """Keep Streamlit's warnings that no server runs off the terminal: none is needed to write a file."""
    from streamlit.logger import set_log_level

    set_log_level("ERROR")
