"""What is current: the one place that says which judgements count, for every reader.

Scores, advantages, selections and groupings are kept side by side, as many series as people compute. Which of them is
meant, when nobody names one or somebody gives a name, is decided here alone: credit, training, evaluation, `show`,
`select`, `compare` and the viewer all read through this room, and so they cannot disagree. The rules themselves are SQL
views (`lake/sql`: ended_order, credit_series, current_advantages, latest_scores, current_scores), so that people's own
queries follow them too.

    credit      a series of advantages, by the name of its estimator or by id; the current one is what ran last
    scores      what a scorer says, NAME for its current version or NAME@VERSION
    selections  what a selection kept
    groupings   the groups of another definition
    predicates  --where: one SQL expression over `episodes`, checked before it runs
"""
