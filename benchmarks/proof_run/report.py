"""The report: figures of the lake in a JSON file, and from that the tables of the page between its markers."""

import json
from pathlib import Path
from typing import Any

import lake
from benchmarks.ladder.report import BEGIN, END, table
from benchmarks.proof_run.figures import figures

RUN = "proof"
"""The loop's run: the name of the folder that docs/proof-run.md gives it."""


def write_report(out: Path | None, page: Path) -> None:
    """Write the JSON file, if there is a run to read, and the tables.

    Args:
        out: folder of the run; None: the JSON file is there.
        page: Markdown with both markers; the JSON file has its name.

    Raises:
        ValueError: the page has no markers.
        UsageError: the run has not ended.
    """
    text, stored = page.read_text(), page.with_suffix(".json")
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        msg = f"{page} has no place for the tables: put the lines {BEGIN} and {END} into it"
        raise ValueError(msg)
    if out is not None:
        stored.write_text(json.dumps(figures(lake.open(out / "lake"), RUN), indent=1) + "\n")
    head, tail = text.partition(BEGIN)[0], text.partition(BEGIN)[2].partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n\n{tables(json.loads(stored.read_text()))}\n\n{END}{tail}")


def tables(measured_figures: dict[str, Any]) -> str:
    """All of them."""
    return "\n\n".join(
        (_declared(measured_figures["evaluation"]), _rounds(measured_figures["rounds"]), _costs(measured_figures))
    )


def _declared(of: dict[str, Any]) -> str:
    rows = []
    for name, at in (("before", 0), ("after", 1)):
        low, high = of[f"interval_{name}"]
        malformed, refused = of["invalid"][at]
        rows.append(
            (
                f"{name} the rounds",
                f"{of[name]} of {of['starts']}",
                f"{of[name] / of['starts']:.1%}",
                f"{low:.1%} to {high:.1%}",
                f"{of['steps'][at]:.1f}",
                _share(malformed),
                _share(refused),
            )
        )
    head = ("weights", "solved", "success", "95 % interval", "actions an episode", "malformed", "refused")
    bounds = "" if of["low"] is None else f" (95 % interval {100 * of['low']:+.1f} to {100 * of['high']:+.1f})"
    verdict = (
        f"The difference is {100 * of['difference']:+.1f} points{bounds}: {of['gained']} starts were solved after the "
        f"rounds only, {of['lost']} before\nthem only; McNemar's test, {of['test']}: p = {of['p']:.2g}."
    )
    return f"The declared comparison, on {of['starts']} held-out starts:\n\n{table(head, rows)}\n\n{verdict}"


def _share(value: float | None) -> str:
    """In per cent; empty where the environment does not say."""
    return "" if value is None else f"{value:.1%}"


def _rounds(rounds: list[dict[str, float]]) -> str:
    rows = [
        (
            f"{row['round'] + 1:.0f}",
            f"{row['return']:.1%}",
            f"{row['steps']:.1f}",
            _share(row["refused"]),
            f"{row['live_groups']:.0f} of {row['live_groups'] + row['dead_groups']:.0f}",
            f"{row['updates']:.0f}",
            f"{row['update_entropy']:.3f}" if row["updates"] else "",
            f"{row['update_ratio_ess']:.3f}" if row["updates"] else "",
            f"{row['tokens']:,.0f}",
            f"{row['seconds']:,.0f}",
        )
        for row in rounds
    ]
    head = ("round", "success", "actions", "refused", "live groups", "updates", "entropy", "ratio ESS", "tokens")
    return f"The rounds; success is that of their rollouts, on training starts:\n\n{table((*head, 'seconds'), rows)}"


def _costs(measured_figures: dict[str, Any]) -> str:
    seconds, sft, traces = measured_figures["seconds"], measured_figures["sft"], measured_figures["traces"]
    collected, evaluated = (measured_figures["tokens"][name] for name in ("rounds", "evaluations"))
    trained = sum(row["updates"] * row["update_tokens"] for row in measured_figures["rounds"] if row["updates"])
    rows = [
        ("traces for SFT", f"{traces['solved']} of {traces['episodes']} solved"),
        ("SFT: updates, tokens, tokens of actions", f"{sft['updates']}, {sft['tokens']:,}, {sft['action_tokens']:,}"),
        ("SFT: loss of the first update and of the last", f"{sft['first_loss']:.2f}, {sft['last_loss']:.2f}"),
        ("SFT: minutes", f"{sft['seconds'] / 60:.0f}"),
        ("tokens of the rounds, and of these sampled", f"{collected['tokens']:,}, {collected['sampled']:,}"),
        ("tokens of the evaluations, and of these sampled", f"{evaluated['tokens']:,}, {evaluated['sampled']:,}"),
        ("tokens trained on in the rounds, context included", f"{trained:,.0f}"),
        ("hours from the first job of the loop to its last", f"{seconds['whole'] / 3600:.2f}"),
        ("minutes of collecting (part of the above), evaluations included", f"{seconds['collect'] / 60:.0f}"),
        ("times the loop was started", f"{measured_figures['attempts']}"),
        *_pushes(measured_figures["probe"]),
        ("ended by", measured_figures["stopped_by"]),
        ("sha256 of the last weights", f"`{measured_figures['weights_sha256'][:16]}...`"),
    ]
    return f"What it took:\n\n{table(('', ''), rows)}"


def _pushes(probe: dict[str, dict[str, float]]) -> list[tuple[str, str]]:
    """How far engine and trainer were apart; nothing where no engine played."""
    if "sync/logprob_diff_mean" not in probe:
        return []
    mean, largest = probe["sync/logprob_diff_mean"], probe["sync/logprob_diff_max"]
    return [
        ("pushes of weights to vLLM", f"{mean['pushes']}"),
        ("log-probabilities, vLLM against trainer: mean difference, over the pushes", f"{mean['mean']:.3f}"),
        ("the same, of the worst push; largest difference at one token", f"{mean['max']:.3f}; {largest['max']:.2f}"),
    ]
