"""The pages of the viewer: each function draws one page, and reads through `viewer.session.read`."""

from collections.abc import Callable, Mapping

from viewer.navigation import Page
from viewer.screens import annotations, change, compare, episodes, groups, jobs, runs, sql, training

PAGES: Mapping[Page, tuple[Callable[[], None], str, str | None]] = {
    Page.RUNS: (runs.show_runs, "Runs", ":material/monitoring:"),
    Page.EPISODES: (episodes.show_episodes, "Episodes", ":material/format_list_bulleted:"),
    Page.GROUPS: (groups.show_groups, "Groups", ":material/workspaces:"),
    Page.ANCHORS: (groups.show_anchors, "Anchors", ":material/anchor:"),
    Page.TRAINING: (training.show_training, "Training", ":material/model_training:"),
    Page.CHANGE: (change.show_change, "What changed", ":material/compare_arrows:"),
    Page.JOBS: (jobs.show_jobs, "Jobs", ":material/account_tree:"),
    Page.ANNOTATIONS: (annotations.show_annotations, "Annotations", ":material/edit_note:"),
    Page.SQL: (sql.show_sql, "SQL", ":material/database:"),
    Page.REJECTS: (jobs.show_rejects, "Rejects", ":material/block:"),
    Page.EPISODE: (episodes.show_episode, "Episode", None),
    Page.GROUP: (groups.show_group, "Group", None),
    Page.COMPARE: (compare.show_side_by_side, "Side by side", None),
    Page.JOB: (jobs.show_job, "Job", None),
    Page.SINCE: (change.show_since, "What changed since", None),
}
"""Function, title and icon of each page; a page without an icon is not in the menu."""
