"""Full-text search: an inverted index of words over everything a person reads, kept as a cache outside the lake."""
