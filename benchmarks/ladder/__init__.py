"""The offline ladder: ways of learning from one fixed data set, compared on held-out worlds over paired seeds.

`python -m benchmarks.ladder --out build/ladder` from the checkout; docs/ladder.md has the protocol and the results.
"""
