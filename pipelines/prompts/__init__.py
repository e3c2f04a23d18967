"""Prompt search: propose system prompts, test them on the same starts, and rank them by their returns.

A candidate plays the starts of the search as a separate run (`candidates`, over `pipelines.collect`). A reflecting
model receives transcripts of the best candidates' best and worst rollouts, and answers with a critique and another
prompt (`reflection`). Each round ranks all candidates, and the best one is compared with the first prompt on held-out
starts (`search`). Jobs of kind `prompts` record the decisions, so a killed search resumes.
"""
