"""What an online run (`trajlake loop`) is called in the tables, for the trainer that writes it and for its readers.

A run has a job of this kind, whose parameter `train_job` names the training job that belongs to it; its rollouts are
the run of its name, one collection round for each round, and its evaluations are a run of their own.
"""

LOOP = "loop"
"""Kind of the job that covers an online run."""


def evaluation_run(run: str) -> str:
    """Name of the run of its evaluations."""
    return f"{run}-eval"


def of_round(run: str, number: int) -> str:
    """The episodes of a round, as a predicate over `episodes`."""
    quoted = run.replace("'", "''")
    return f"run_id = '{quoted}' AND collection_round = {number}"
