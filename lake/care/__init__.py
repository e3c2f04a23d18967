"""Care of a lake: doctor, compaction, vacuum, retraction, erasure, pins and claims."""
