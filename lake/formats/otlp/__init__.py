"""OpenTelemetry traces: the reader, and the conventions for calls of models."""
