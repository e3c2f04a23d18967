"""`trajlake annotate`: what a person says of episodes and steps, from the command line."""

import getpass

import click

import lake
from lake.cli.options import chosen_episodes, lake_option
from lake.errors import UsageError
from lake.read.text_table import counted


@click.command()
@click.argument("episodes", nargs=-1)
@lake_option
@click.option("--where", help="SQL on `episodes`, as \"task_id = '12'\".  [default: none but EPISODES]")
@click.option("--step", type=click.IntRange(min=0), help="Of one episode, the step.  [default: the whole episode]")
@click.option("--label", default="rating", show_default=True, help="What is being said, as failure_mode.")
@click.option("--value", type=float, help="As a number. Numbers are scores: --score human, or human.LABEL.")
@click.option("--text", help="In words.")
@click.option("--author", help="Who says so.  [default: the user's name]")
@click.option("--take-back", is_flag=True, help="Take this author's label back, instead of --value and --text.")
def annotate(
    episodes: tuple[str, ...],
    lake_uri: str,
    where: str | None,
    step: int | None,
    label: str,
    value: float | None,
    text: str | None,
    author: str | None,
    take_back: bool,
) -> None:
    """Put a label on EPISODES, or on a step: a number, words, or both. It is added to what was said before.

    Of one author, episode, step and label the last one counts. `trajlake show` prints them, the view
    `latest_annotations` has them, and the viewer writes them too.
    """
    from lake.write.annotations import Annotation
    from lake.write.annotations import annotate as write

    if take_back == (value is not None or text is not None):
        raise UsageError("give --value, --text or both; or --take-back alone")
    target = lake.open(lake_uri)
    chosen = chosen_episodes(target, episodes, where)
    if not chosen:
        raise UsageError("no episodes are named; give ids, or a --where that some episodes meet")
    said = [Annotation(episode_id=one, label=label, step_index=step, value=value, text=text) for one in chosen]
    count = write(target, said, author or getpass.getuser())
    click.echo(f"{counted(count, 'annotation')} {'taken back' if take_back else 'written'}")
