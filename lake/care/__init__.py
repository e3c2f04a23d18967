"""Looking after a lake: doctor, compaction, vacuum, erasure, and the pins that keep versions readable."""
