-- Macros: ids as people see them (13 base32 characters) and as they are stored (int64).
-- id('0k3...') -> BIGINT; id_text(bigint) -> VARCHAR. The alphabet is filled in from lake/ids.py.
CREATE MACRO id(t) AS (
    CASE WHEN NOT regexp_full_match(lower(trim(t)), '[{alphabet}]{13}')
    THEN error(t || ' is not an id: it has 13 characters of {alphabet}')
    ELSE list_reduce(
        list_prepend(
            0::HUGEINT,
            list_transform(
                range(1, 14),
                lambda i : (strpos('{alphabet}', substr(lower(trim(t)), i::INTEGER, 1)) - 1)::HUGEINT
            )
        ),
        lambda value, digit : value * 32 + digit
    ) % 9223372036854775808 END
)::BIGINT;
CREATE MACRO id_text(v) AS (
    list_aggregate(
        list_transform(
            range(12, -1, -1),
            lambda i : substr('{alphabet}', (((v >> (5 * i)::BIGINT) & 31) + 1)::INTEGER, 1)
        ),
        'string_agg', ''
    )
);
