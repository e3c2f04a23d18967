"""Estimate a lake's bytes, files, hours, memory and first limit before it exists.

    from pipelines.estimate import Cluster, Workload, estimate

    estimate(Workload(episodes=10_000_000, episode_steps=10, step_tokens=200), Cluster(nodes=4, cores=16))

`model.py` has the formulas, and `fits.json` has their factors, which `benchmarks/fit_estimate.py` measures.
"""

from pipelines.estimate.model import Cluster, Estimate, Workload, estimate, measure_stored_bytes, measure_workload

__all__ = ["Cluster", "Estimate", "Workload", "estimate", "measure_stored_bytes", "measure_workload"]
