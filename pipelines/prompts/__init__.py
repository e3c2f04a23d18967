"""Prompts: system prompts are proposed, tested on the same starts, and ranked by what they return.

A candidate (`candidates`) plays the starts of the search as a run of its own (`play`, over `pipelines.collect`). An
endpoint is shown what the best candidates did at their best and worst (`evidence`), and answers with a critique and
another prompt (`reflection`). Candidates are ranked by start (`ranking`), round after round (`search`); the best is
then compared with the first prompt on starts that nothing before has seen. What was decided stands in jobs of kind
`prompts` (`ledger`), so that a search that was killed goes on.
"""
