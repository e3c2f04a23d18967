"""OpenTelemetry traces, one file per convention."""
