"""Traces of any tracer: spans as a tree, their payloads as messages, traces as episodes."""
