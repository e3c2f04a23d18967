"""tau2-bench results."""
