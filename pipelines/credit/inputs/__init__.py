"""What credit is computed from: the chosen episodes, their steps as arrays, and ranges that fit into memory."""
