"""Estimate: what a lake will take before it is there: bytes, files, hours, memory, and where its first limit lies.

    from pipelines.estimate import Cluster, Workload, estimate

    estimate(Workload(episodes=10_000_000, episode_steps=10, step_tokens=200), Cluster(nodes=4, cores=16))

`model.py` has the formulas, `fits.json` their factors, which `benchmarks/fit_estimate.py` measures.
"""

from pipelines.estimate.model import Cluster, Estimate, estimate, stored_of
from pipelines.estimate.workload import Workload, workload_of

__all__ = ["Cluster", "Estimate", "Workload", "estimate", "stored_of", "workload_of"]
