"""Helper of the examples: a module of their own folder, so a change here makes a new version of what imports it."""

import json


def tool_calls(messages):
    """[name, arguments] of every tool call, in order."""
    return [
        [call["function"]["name"], json.loads(call["function"]["arguments"])]
        for message in messages
        for call in message.tool_calls or []
    ]
