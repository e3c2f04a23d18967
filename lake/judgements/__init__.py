"""What is current: the one place that decides which judgements count, for every reader.

Scores, advantages, selections and groupings are kept side by side, as many series as people compute. Which of them is
meant, when nobody names one or somebody gives a name, is decided here alone, so that credit, training, evaluation,
`show`, `select`, `compare` and the viewer cannot disagree. The rules themselves are SQL views (`lake/sql`: ended_order,
credit_series, current_advantages, latest_scores, current_scores, current_score), so that people's own queries follow
them too.
"""
