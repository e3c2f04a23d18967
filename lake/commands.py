"""The lake's commands: where each lives, and its line in `trajlake -h`."""

COMMANDS = {
    "ingest": ("lake.commands_write:ingest", "Read trajectory files into a lake."),
    "sql": ("lake.commands_read:sql", "Query a lake with one SELECT."),
    "show": ("lake.commands_read:show", "Print an episode to read."),
    "tables": ("lake.commands_read:tables", "List tables, or their columns."),
    "history": ("lake.commands_read:history", "List the commits of a lake."),
    "doctor": ("lake.commands_read:doctor", "Check a lake and this installation."),
}
