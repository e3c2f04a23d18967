"""A reward function: the sooner the lamp is found, the better. It runs in a sandbox on the nodes of the cluster."""


def soon(env_return: float | None, num_steps: int) -> float:
    """1 for a lamp in one move, less with each further one; 0 where it was not found."""
    return (env_return or 0.0) / num_steps
