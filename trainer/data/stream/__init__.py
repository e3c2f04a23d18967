"""From a plan to micro-batches: row groups read ahead, collated into packed buffers."""
