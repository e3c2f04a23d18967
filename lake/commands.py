"""The lake's commands: where each lives, and its line in `trajlake -h`."""

COMMANDS = {
    "ingest": ("lake.commands_write:ingest", "Read trajectory files into a lake."),
    "sql": ("lake.commands_read:sql", "Query a lake with one SELECT."),
    "show": ("lake.commands_read:show", "Print an episode to read."),
    "tables": ("lake.commands_read:tables", "List tables, or their columns."),
    "history": ("lake.commands_read:history", "List the commits of a lake."),
    "diff": ("lake.commands_maintain:diff", "Say what changed between two snapshots."),
    "snapshot": ("lake.commands_maintain:snapshot", "Name the lake as it is now, list the names, drop one."),
    "retract": ("lake.commands_maintain:retract", "Hide episodes from later readers."),
    "forget": ("lake.commands_maintain:forget", "Erase episodes for good."),
    "compact": ("lake.commands_maintain:compact", "Merge small files into sorted ones."),
    "vacuum": ("lake.commands_maintain:vacuum", "Delete files that nobody needs."),
    "doctor": ("lake.commands_read:doctor", "Check a lake and this installation."),
}
