"""The learning study: GiGPO, GRPO and RLOO online on two text games, at equal tokens, over paired seeds.

`python -m benchmarks.learning --out build/learning` from the checkout; docs/learning.md has protocol and results.
"""
