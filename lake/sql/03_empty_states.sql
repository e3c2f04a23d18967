-- is_empty_state(state_hash): whether a state says nothing, so that anything may lead to it: blank, or an empty list,
-- object, text or null. NULL where the state is not known. The hashes are filled in from lake/read/query_views.py.
CREATE MACRO is_empty_state(state_hash) AS list_contains([{empty_states}]::BIGINT[], state_hash);
