"""pass@k and pass^k of one task, from n attempts of which c succeeded.

pass@k: at least one of k attempts succeeds. Unbiased from n >= k attempts (Chen et al. 2021, arXiv 2107.03374):

    pass@k = 1 - C(n - c, k) / C(n, k)

pass^k: all of k attempts succeed (tau-bench: Yao et al. 2024, arXiv 2406.12045):

    pass^k = C(c, k) / C(n, k)

Both are averaged over tasks. With fewer than k attempts a task says nothing.
"""

from math import comb


def pass_at_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that one of k attempts succeeds; None for fewer than k attempts."""
    return None if attempts < k else 1.0 - comb(attempts - successes, k) / comb(attempts, k)


def pass_all_k(attempts: int, successes: int, k: int) -> float | None:
    """Probability that all of k attempts succeed; None for fewer than k attempts."""
    return None if attempts < k else comb(successes, k) / comb(attempts, k)
