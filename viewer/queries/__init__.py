"""Every read of the viewer, one module per subject: pure functions (lake, arguments) -> small Polars frame.

Nothing here knows Streamlit. Values are bound parameters, never pasted into SQL; filters, order and paging happen in
SQL with LIMIT, and texts are cut there, so that no screen depends on the size of the lake. Ids are int64; unknown stays
NULL.
"""
