"""Calls of a model, however they were recorded: the four APIs, where a prompt goes on, the step that a call is."""
