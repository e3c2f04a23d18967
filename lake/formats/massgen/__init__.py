"""MassGen: traces, session logs, coordination logs."""
