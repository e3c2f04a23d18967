"""Traces of any tracer: payloads as messages, spans as episodes."""
