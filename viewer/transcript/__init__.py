"""The transcript of an episode: one line a step, opened on demand, with the ledger of its credit.

`told` is what it is of. `component` mounts it; its page fetches opened steps from `route`, which `answers` answers.
`outline` makes the lines and `folds` finds repeats among them. `opened` makes what a step shows: `blocks` its texts,
`ledger` its credit, `tokens` its token strip. The page's part is plain JavaScript (`transcript.js` and the files beside
it).
"""
