"""The viewer's command: where it lives, and its line in `trajlake -h`."""

COMMANDS = {
    "view": ("viewer.launch:view", "Open the viewer on a lake."),
}
