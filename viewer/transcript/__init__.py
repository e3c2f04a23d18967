"""The transcript of an episode: one line a step, opened on demand, with the ledger of its credit.

`view_model` reads an episode and describes it for the page. `outline` builds its lines and credit ledgers, `blocks` the
texts of a step, and `tokens` its token strip. `component` draws a transcript on a page and answers its requests; `page`
writes transcripts as an HTML file. The page's part is plain JavaScript (`transcript.js` and the files with it).
"""
