"""The transcript of an episode: one line a step, opened on demand, with the ledger of its credit.

`component` mounts it and answers what it asks. `outline` makes the lines and `folds` finds repeats among them, `blocks`
makes the texts of an opened step, `ledger` its credit, `tokens` its token strip. The page's part is plain JavaScript
(`transcript.js` and the files beside it).
"""
