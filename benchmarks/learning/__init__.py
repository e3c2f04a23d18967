"""The learning study: seven arms online on text games that people know, at equal tokens, over paired seeds.

`python -m benchmarks.learning --out build/learning` from the checkout; docs/learning.md has protocol and results.
"""
