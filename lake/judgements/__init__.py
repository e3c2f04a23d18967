"""The current judgements: the only modules that decide which judgements count, for every reader.

Scores, advantages, selections and groupings are stored side by side, in any number of series. These modules decide
which series a name means and which one is the default, so that credit, training, evaluation, `show`, `select`,
`compare` and the viewer agree. The rules are SQL views (`lake/sql`: ended_order, credit_series, current_advantages,
latest_scores, current_scores, current_score), so users' own queries follow them too.
"""
