"""JSON arrays read element by element: what is complete is kept, no matter where the document is damaged, for any
window.

The oracle is `json.loads` on the whole document. Every test runs the reader with windows from one character up, so that
every token stands on an edge of the window once.
"""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake import records
from lake.formats.base import json_array
from lake.formats.base.json_array import Element, read_array
from lake.records import Reject

VALUES: list[Any] = [
    {"a": 'quotes " and \\ back\n', "b": [1, -2.5, 1e-7, 12345678901234567890], "c": None},
    {},
    [[], [{"deep": [True, False]}]],
    "\u00e9\U0001f600\u2028]",
    {"brackets": "}{][", "": ""},
    123456789,
    -0.5e10,
    True,
    None,
]
DOCUMENT = json.dumps(VALUES, ensure_ascii=False, indent=1)


@pytest.fixture(params=[1, 2, 3, 7, 64, 1 << 20], ids="window {}".format)
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Characters read at a time."""
    monkeypatch.setattr(json_array, "_CHUNK", request.param)
    return int(request.param)


def read(path: Path, document: str | bytes) -> tuple[list[Element], Reject | None]:
    """Elements and damage of a document; damage stands last."""
    path.write_bytes(document.encode("utf-8", "surrogatepass") if isinstance(document, str) else document)
    items = list(read_array(path))
    damage = items.pop() if items and isinstance(items[-1], Reject) else None
    elements = [item for item in items if isinstance(item, Element)]
    assert len(elements) == len(items), "damage is reported once, at the end"
    assert [element.index for element in elements] == list(range(len(elements)))
    assert damage is None or damage.position == len(elements)
    return elements, damage


@pytest.mark.usefixtures("window")
def test_every_element_comes_with_its_value_and_its_text(tmp_path: Path) -> None:
    elements, damage = read(tmp_path / "file", DOCUMENT)
    assert damage is None
    assert [element.value for element in elements] == VALUES
    assert [json.loads(element.raw) for element in elements] == VALUES
    assert all(element.raw in DOCUMENT and element.raw == element.raw.strip() for element in elements)


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize("document", ["[]", " [ ] ", "\ufeff[]", "[\n\n]\n\t\r\n"])
def test_an_empty_array_has_no_elements(tmp_path: Path, document: str) -> None:
    assert read(tmp_path / "file", document) == ([], None)


def complete_before(cut: int) -> int:
    """How many elements of DOCUMENT end before a character, by trial."""
    decoder, position, count = json.JSONDecoder(), 1, 0
    while count < len(VALUES):
        while DOCUMENT[position] in " \n,":
            position += 1
        position = decoder.raw_decode(DOCUMENT, position)[1]
        # A number that ends with the document might have gone on.
        if position > cut or (position == cut and isinstance(VALUES[count], float | int) and VALUES[count] is not True):
            return count
        count += 1
    return count


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_a_document_cut_anywhere_keeps_what_was_complete(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", size)
    for cut in range(1, len(DOCUMENT)):
        elements, damage = read(tmp_path / "file", DOCUMENT[:cut])
        assert damage is not None
        assert damage.reason == "truncated", f"cut at {cut}: {DOCUMENT[:cut][-20:]!r} {damage.message}"
        complete = complete_before(cut)
        assert complete <= len(elements) <= complete + 1
        assert [e.value for e in elements][:complete] == VALUES[:complete]
        assert DOCUMENT[:cut].endswith(damage.raw), "what was not taken is handed back to the last character"


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
@pytest.mark.parametrize("damage_with", ["\x00", "#", "]", '"', "\\"])
def test_a_wrong_character_anywhere_costs_nothing_before_it(
    tmp_path: Path, size: int, damage_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", size)
    for cut in range(0, len(DOCUMENT), 3):
        document = DOCUMENT[:cut] + damage_with + DOCUMENT[cut + 1 :]
        elements, damage = read(tmp_path / "file", document)
        complete = complete_before(cut) if cut else 0
        assert [e.value for e in elements][:complete] == VALUES[:complete]
        try:
            expected_items = json.loads(document)
        except json.JSONDecodeError:
            assert damage is not None
            assert document.endswith(damage.raw)
        else:
            assert damage is None
            assert [e.value for e in elements] == expected_items


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(
    ("document", "complete", "says"),
    [
        ('[{"a": 1}, {"a": x}]', 1, "Expecting value"),
        ('[{"a": 1} {"a": 2}]', 1, "expected ','"),
        ('[{"a": 1}, {"a": 2}] and more', 2, "expected the end, found 'a'"),
        ('[{"a": 1},]', 1, "Expecting value"),
        ("[,]", 0, "Expecting value"),
        ('{"a": 1}', 0, "expected '['"),
        ("task_id", 0, "expected '[', found 't'"),
        ("[{\"a\": 1}, {'a': 2}]", 1, "Expecting property name"),
        ('[{"a": "tab\there"}]', 0, "Invalid control character"),
        ('[{"a": "\\x"}]', 0, "Invalid \\escape"),
        ('[{"a": 01}]', 0, "Expecting ',' delimiter"),
    ],
)
def test_a_fault_inside_a_document_is_no_truncation(tmp_path: Path, document: str, complete: int, says: str) -> None:
    elements, damage = read(tmp_path / "file", document)
    assert len(elements) == complete
    assert damage is not None
    assert says in damage.message
    assert ("from its start" in damage.message) == (complete == 0)
    assert damage.reason == "malformed"


@pytest.mark.usefixtures("window")
def test_bytes_that_are_not_utf8_damage_their_element_alone(tmp_path: Path) -> None:
    elements, damage = read(tmp_path / "file", b'[{"a": "caf\xe9"}, {"a": "caf\xc3\xa9"}]')
    assert damage is None
    assert elements[1].value == {"a": "caf\u00e9"}
    assert elements[0].raw == '{"a": "caf\\udce9"}'
    with pytest.raises(UnicodeEncodeError):
        elements[0].value["a"].encode()


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(
    "strange",
    [
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
        "[" * 5000 + '"]]"' + "]" * 5000,
        '{"a": ' + "9" * 5000 + "}",
        '{"a": "\\"]}", "b": ' + "9" * 5000 + ', "c": "]"}',
    ],
    ids=["deep object", "deep list", "endless digits", "digits among brackets"],
)
def test_what_python_cannot_hold_costs_its_element_alone(tmp_path: Path, strange: str) -> None:
    elements, damage = read(tmp_path / "file", f'[{{"a": 1}}, {strange}, {{"a": 2}}]')
    assert damage is None
    assert [element.value for element in elements] == [{"a": 1}, None, {"a": 2}]
    assert elements[1].raw == strange
    assert elements[1].problem
    assert elements[0].problem is elements[2].problem is None


def test_what_python_cannot_hold_and_does_not_end_is_damage(tmp_path: Path) -> None:
    elements, damage = read(tmp_path / "file", '[{"a": 1}, ' + "[" * 5000 + '"')
    assert len(elements) == 1
    assert damage is not None
    assert damage.reason == "truncated"


def test_what_is_handed_back_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RAW_LIMIT", 100)
    _, damage = read(tmp_path / "file", "[1, x" + "y" * 1000)
    assert damage is not None
    assert damage.raw.startswith("xyyy")
    assert len(damage.raw) < 130
    assert damage.raw.endswith("[cut at 16 MB]")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
)


@given(
    values=st.lists(JSON, max_size=6),
    size=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 3]),
    escape=st.booleans(),
)
def test_any_array_is_read_as_json_reads_it(
    values: list[Any], size: int, indent: int | None, escape: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    document = json.dumps(values, indent=indent, ensure_ascii=escape)
    path = tmp_path_factory.getbasetemp() / "any-array.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK", size)
        elements, damage = read(path, document)
    assert damage is None
    assert [element.value for element in elements] == json.loads(document.encode("utf-8", "surrogatepass"))


@pytest.mark.usefixtures("window")
@pytest.mark.parametrize(
    "long", ['"' + 'a\\\\\\"]' * 90 + '"', '{"b": ["' + "{" * 90 + '\\\\"]}', "[" + "[1]," * 90 + "2]"]
)
def test_an_element_that_is_too_long_costs_itself_alone(
    tmp_path: Path, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "VALUE_LIMIT", 40)
    elements, damage = read(tmp_path / "file", f'[{{"a": 1}}, {long}, {{"a": 2}}]')
    assert damage is None
    assert [element.value for element in elements][::2] == [{"a": 1}, {"a": 2}]
    assert elements[1].value == json.loads(long) or "it is longer than" in str(elements[1].problem)
    _, damage = read(tmp_path / "file", f"[1, {long[:-1]}")
    assert damage is not None
    assert damage.reason == "truncated"


def test_nothing_is_kept_of_an_element_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "VALUE_LIMIT", 1 << 20)
    monkeypatch.setattr(json_array, "_CHUNK", 1 << 16)
    (tmp_path / "file").write_bytes(b'[{"a": 1}, {"a": "' + b"a" * (30 << 20) + b'"}, {"a": 2}]')
    tracemalloc.start()
    try:
        first, long, last = read_array(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert isinstance(first, Element)
    assert isinstance(last, Element)
    assert (first.value, last.value) == ({"a": 1}, {"a": 2})
    assert isinstance(long, Element)
    assert "it is longer than 1 MB" in str(long.problem)
    assert len(long.raw) == 1 << 16
