"""Statistics that more than one layer tells results by: intervals over tasks, and paired tests."""
