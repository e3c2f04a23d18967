"""Training from the lake: which tokens, in which order, under which loss, and what became of the weights.

Data reaches the trainer only through tables: token rows joined with one credit job's advantages at pinned versions.
Modules named after data (`selection`, `plan`, `stream`) need no torch; those named after the model import it.
"""
