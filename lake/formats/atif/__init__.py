"""ATIF trajectories and Harbor trials."""
