"""The doctor: is the lake whole, is the installation ours, and what would do it good.

The import names `lake`, `pipelines`, `trainer` and `viewer` are plain words, and PyPI has packages that use them; one
of them installs into `trainer/` and overwrites files without a word. Two questions find every such case: does another
distribution own one of the names, and does each name resolve to the folder beside this package? `trajlake doctor` and
the layout test both ask here.
"""

from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import distributions
from pathlib import Path

import polars as pl

from lake import ids
from lake.care.compaction import FEW_FILES, TARGET_BYTES
from lake.errors import LakeAccessError, NotALakeError, TrajlakeError
from lake.lake import Lake
from lake.opening import open as open_lake
from lake.read.lost_rows import lost_jobs
from lake.read.parquet import scan
from lake.read.snapshot import Snapshot
from lake.read.text_table import counted
from lake.storage.commits import log_faults
from lake.storage.data_files import FileEntry, digest_in_name, digest_of
from lake.storage.objects import Objects
from lake.storage.store import Store
from lake.tables import TABLES
from lake.tables.columns import Visibility
from lake.tables.contracts import conform

DISTRIBUTION = "trajlake"
LAYERS = ("lake", "pipelines", "trainer", "viewer")


def installation_faults() -> list[str]:
    """One line per problem of this installation, empty if there is none."""
    return [*foreign_owners(owners_of_layers()), *misplaced_layers(Path(__file__).resolve().parents[2])]


def owners_of_layers() -> dict[str, list[str]]:
    """Layer -> distributions that install it: their lists of files are searched, as parsing them takes a second."""
    owners: dict[str, list[str]] = {layer: [] for layer in LAYERS}
    for distribution in distributions():
        files = f"\n{distribution.read_text('RECORD') or ''}"
        declared = (distribution.read_text("top_level.txt") or "").split()
        for layer in LAYERS:
            if layer in declared or f"\n{layer}/" in files:
                owners[layer].append(distribution.name)
    return owners


def foreign_owners(owners: Mapping[str, Sequence[str]]) -> list[str]:
    """Other distributions that own a layer's name."""
    return [
        f"`{layer}` is also installed by `{owner}`, which may have overwritten ours; run "
        f"`pip uninstall {owner}`, then install {DISTRIBUTION} again"
        for layer in LAYERS
        for owner in sorted(set(owners.get(layer, ())))
        if owner.lower() != DISTRIBUTION
    ]


def misplaced_layers(root: Path) -> list[str]:
    """Layers that do not resolve to their folder under `root`, whoever put something else in front."""
    problems = []
    for layer in LAYERS:
        expected = root / layer / "__init__.py"
        # The finder, not `find_spec`: what is already imported must not hide what a fresh process would import.
        spec = PathFinder.find_spec(layer)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found != expected:
            place = "nothing" if found is None else str(found)
            problems.append(
                f"`import {layer}` finds {place} instead of {expected}; remove it, or take its folder off PYTHONPATH"
            )
    return problems


Finding = tuple[str, str, str]
"""Check, verdict (fine | note | wrong), detail."""

_CHECKS = {
    "steps have no gaps": (
        "SELECT id_text(e.episode_id) || ' has ' || coalesce(s.n, 0) || ' of ' || e.num_steps || ' steps' AS what"
        " FROM episodes e LEFT JOIN (SELECT episode_id, count(*) AS n, max(step_index) AS last FROM steps GROUP BY 1) s"
        " USING (episode_id) WHERE s.n IS DISTINCT FROM e.num_steps OR s.last <> e.num_steps - 1"
    ),
    "every step has an episode": (
        "SELECT id_text(episode_id) || ' has steps but no episode' AS what"
        " FROM (SELECT DISTINCT episode_id FROM steps) ANTI JOIN episodes USING (episode_id)"
    ),
    "one attempt of a rollout counts": (
        "SELECT count(*) || ' attempts of rollout ' || rollout_index || ' of group ' || id_text(group_id) || ' are"
        " visible; retract all but one' AS what FROM episodes"
        " GROUP BY group_id, rollout_index, agent_id HAVING count(*) > 1"
    ),
    "jobs end once": (
        "SELECT id_text(job_id) || ' has ' || count(*) || ' succeeded rows' AS what"
        " FROM jobs WHERE event = 'succeeded' GROUP BY job_id HAVING count(*) > 1"
    ),
}
_REPEATS = ("batches", "metrics", "jobs")
"""Tables whose keys repeat where a run or a job was resumed; their views choose."""


def diagnose(uri: str) -> pl.DataFrame:
    """As `examine`, also of a damaged lake. Raises TrajlakeError: none of its tables can be opened or is ours."""
    store = Store(Objects(uri))
    try:
        return examine(open_lake(uri))
    except (LakeAccessError, NotALakeError) as error:
        had = store.had()
        opened = {name: _opened(store, name) for name in TABLES}
        problems = {name: what for name, what in opened.items() if what is not None and (what or name in had)}
        is_foreign = isinstance(error, NotALakeError) and store.exists()
        if is_foreign or None not in opened.values():
            raise
    faults = [f"the table {name} is {what or 'missing'}" for name, what in problems.items()]
    advice = "; restore them from a backup, or ingest their source again into a new lake"
    return _frame([_installation(), _judged("every table can be opened", faults, advice)])


def _opened(store: Store, name: str) -> str | None:
    """None if a table can be opened, empty if it is not there, else what is wrong with it."""
    try:
        return "" if store.files(name)[0] == -1 else None
    except TrajlakeError as error:
        return f"damaged: {error}"


def examine(lake: Lake) -> pl.DataFrame:
    """All findings (check, verdict, detail). Every file is decoded and held against its table's contract."""
    findings = [_installation()]
    try:
        snapshot = lake.snapshot()
    except TrajlakeError as error:
        findings.append(("every table can be opened", "wrong", f"{error}; restore it from a backup"))
        return _frame(findings)
    findings += _files(snapshot)
    if findings[-1][1] == "wrong" or findings[-2][1] == "wrong":
        return _frame(findings)
    advice = "; what was committed is lost: restore the log from a backup, or ingest its source again"
    findings.append(_judged("the logs are whole", log_faults(snapshot.objects, snapshot.versions)[:5], advice))
    findings.append(_recorded(snapshot))
    findings += [_from_query(snapshot, check, query) for check, query in _CHECKS.items()]
    for name, table in TABLES.items():
        if name not in _REPEATS and not table.distinct:
            key = ", ".join(table.key)
            query = f"SELECT count(*) || ' rows of one key' AS what FROM {name} GROUP BY {key} HAVING count(*) > 1"
            findings.append(_from_query(snapshot, f"keys of {name} are unique", query))
    rows = snapshot.sql("SELECT kind, count(*) AS n FROM job_runs WHERE status = 'started' GROUP BY 1 ORDER BY 1")
    open_jobs = ", ".join(f"{n} {kind}" for kind, n in rows.iter_rows())
    open_jobs += ": running, or killed" if open_jobs else ""
    findings += [
        _pins(lake),
        _dead(snapshot),
        ("unfinished jobs", "note" if open_jobs else "fine", open_jobs),
        *_space(lake, snapshot),
    ]
    return _frame(findings)


def _frame(findings: Sequence[Finding]) -> pl.DataFrame:
    return pl.DataFrame(findings, schema=["check", "verdict", "detail"], orient="row")


def _judged(check: str, faults: Sequence[str], advice: str = "") -> Finding:
    """Fine without faults, else wrong."""
    return (check, "wrong" if faults else "fine", "; ".join(faults) + (advice if faults else ""))


def _installation() -> Finding:
    return _judged("the four packages are ours", installation_faults())


def _files(snapshot: Snapshot) -> list[Finding]:
    """Every file is there, decodes, has the rows the log says, and keeps its table's contract."""
    damaged: list[str] = []
    broken: list[str] = []
    # What counts of the other tables is said by those that are always visible: without them there is no look further.
    for name in sorted(TABLES, key=lambda name: TABLES[name].visibility is Visibility.ACCEPTED):
        if damaged and TABLES[name].visibility is Visibility.ACCEPTED:
            break
        for entry in snapshot.entries(name):
            # Decoded, not just opened: a flipped byte shows nowhere else.
            try:
                if (fault := _decoded(snapshot, name, entry)) is not None:
                    damaged.append(f"{entry.name} of {name} {fault}")
            except TrajlakeError as error:
                broken.append(str(error))
            except (OSError, pl.exceptions.PolarsError) as error:
                damaged.append(f"{entry.name} of {name}: {str(error).splitlines()[0]}")
    advice = (
        "; restore the files from a backup, or ingest their source again into a new lake. Rows of `advantages` and "
        "`scores` can be computed again: `trajlake credit NAME --force`, `trajlake score NAME --force`"
    )
    return [
        _judged("every file is there and readable", damaged[:5], advice),
        _judged("every row keeps its contract", broken[:5]),
    ]


def _decoded(snapshot: Snapshot, name: str, entry: FileEntry) -> str | None:
    """What is wrong with a file: its bytes are not those that were written, its rows, or its contract."""
    digest = digest_in_name(entry.name)
    if digest is not None and digest_of(snapshot.objects, f"{name}/{entry.name}") != digest:
        return "is not what was written: its bytes have another digest than its name says"
    frame = scan([entry.path], TABLES[name], snapshot.objects.polars_options).collect()
    if frame.height != entry.rows:
        return f"has {counted(frame.height, 'row')}, the log says {entry.rows}"
    conform(frame, TABLES[name])
    return None


def _recorded(snapshot: Snapshot) -> Finding:
    """What jobs say they recorded and retracted is there, or was forgotten."""
    ended = snapshot.scan("jobs").filter(pl.col("event") == "succeeded").unique("job_id").collect()
    recorded = {kind: int(part["rows_out"].sum()) for (kind,), part in ended.group_by("kind")}
    retractions = snapshot.scan_all("retractions").select("episode_id", "kind").collect()
    gone = retractions.filter(pl.col("kind") == "forgotten")["episode_id"]
    there = snapshot.scan_all("episodes").select("episode_id").collect()["episode_id"]
    counts = (
        ("recorded", recorded.get("ingest", 0) + recorded.get("record", 0), pl.concat([gone, there]).n_unique()),
        ("retracted", recorded.get("retract", 0), retractions.filter(pl.col("kind") == "retracted").height),
        ("restored", recorded.get("restore", 0), retractions.filter(pl.col("kind") == "restored").height),
    )
    lost = [f"jobs {what} {counted(n, 'episode')}, the lake knows {found}" for what, n, found in counts if found < n]
    lost += [
        f"{kind} job {ids.to_text(job_id)} has lost {n} of its writes" for job_id, kind, n in lost_jobs(snapshot).rows()
    ]
    return _judged("what jobs recorded is there", lost, "; ingest their sources again, or run the jobs again")


def _from_query(snapshot: Snapshot, check: str, query: str) -> Finding:
    try:
        found = snapshot.sql(query)["what"].to_list()
    except TrajlakeError as error:
        return (check, "wrong", str(error))
    return _judged(check, found[:3], f" (+{len(found) - 3} more)" if len(found) > 3 else "")


def _pins(lake: Lake) -> Finding:
    """Every named snapshot can be read, and shows what it showed."""
    notes = []
    try:
        for pin in lake.snapshots():
            missing = lake.missing(pin.versions)
            if missing:
                notes.append(f"{pin.name}: {missing}; drop it")
            elif (cut := lake.at(pin.versions)).forgotten:
                count = cut.forgotten + cut.size("episodes")[1]
                lost = f"{cut.forgotten} of {count} episodes were forgotten since"
                notes.append(f"{pin.name}: {lost}; the rest is readable")
    except TrajlakeError as error:
        return ("named snapshots are readable", "wrong", str(error))
    return ("named snapshots are readable", "note" if notes else "fine", "; ".join(notes[:3]))


def _dead(snapshot: Snapshot) -> Finding:
    dead = snapshot.dead_write_ids
    names = ", ".join(ids.to_text(write_id) for write_id in sorted(dead)[:3])
    detail = (
        f"{len(dead)} write attempts never became visible (killed or racing writers): {names}; `trajlake vacuum` drops "
        "them after 7 days"
    )
    return ("dead writes", "note" if dead else "fine", detail if dead else "")


def _space(lake: Lake, snapshot: Snapshot) -> list[Finding]:
    """Files and bytes that are live, and what lies beside them."""
    parts, many, idle = [], [], 0
    for name in TABLES:
        entries = snapshot.entries(name)
        if not entries:
            continue
        live = sum(entry.bytes for entry in entries)
        idle += sum(found.bytes for found in snapshot.objects.list(name)) - live
        parts.append(f"{name} {live / 1e6:.1f} MB in {counted(len(entries), 'file')}")
        if sum(entry.bytes < TARGET_BYTES // 2 for entry in entries) > FEW_FILES:
            many.append(name)
    advice = f"; `trajlake compact {' '.join(many)}` would speed them up" if many else ""
    return [
        ("disk use", "note" if many else "fine", ", ".join(parts) + advice),
        ("logs and files of older versions", "fine", f"{idle / 1e6:.1f} MB"),
    ]
