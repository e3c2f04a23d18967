"""The fast reader of JSON arrays reads what the slow, obvious one reads, whole, cut anywhere or damaged anywhere.

The oracle walks over the document with the standard library, in one piece, element by element. Elements look alike, as
in real files, so that the fast reader finds its boundaries; some of them hold what only the scanner takes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake import records
from lake.formats.base import json_array
from lake.formats.base.json_array import Element, read_array
from lake.formats.base.source import Meter
from lake.records import Reject
from testkit.examples import examples

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SPACE = " \t\r\n"
TEXT = st.text(max_size=6) | st.sampled_from(['},{"a":', "]", '"', "\\", '\n  },\n  {"a":', "\u2028\U0001f600"])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.just("a"), inner, max_size=3),
    max_leaves=6,
)
ODD = st.sampled_from([float("nan"), float("-inf"), "\ud800", {"\udfff": 1}, [float("inf")]])
ALIKE = st.builds(lambda a, extra: {"a": a} | extra, PLAIN | ODD, st.dictionaries(TEXT, PLAIN, max_size=2))
UNLIKE = PLAIN | st.dictionaries(TEXT, PLAIN, max_size=2)
ELEMENTS = st.lists(ALIKE, max_size=12) | st.lists(ALIKE | UNLIKE, max_size=8)
INDENTS = st.sampled_from([None, 0, 2, "\t"])
SEPARATORS = st.sampled_from([None, (",", ":"), (" ,", " : "), (" ,\r\n", ":")])
WINDOWS = st.sampled_from([1, 3, 16, 64, 256, 1 << 20])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reader") / "array.json"


def oracle(content: bytes) -> tuple[list[tuple[Any, str]], bool]:
    """Values and texts of the elements that are complete, and whether the document is damaged behind them."""
    text = content.decode("utf-8-sig", "surrogateescape")
    decode = json.JSONDecoder().raw_decode
    pieces: list[tuple[Any, str]] = []

    def after_space(position: int) -> int:
        while text[position : position + 1] and text[position] in SPACE:
            position += 1
        return position

    position = after_space(0)
    if text[position : position + 1] != "[":
        return pieces, True
    position = after_space(position + 1)
    while text[position : position + 1] != "]":
        if pieces:
            if text[position : position + 1] != ",":
                return pieces, True
            position = after_space(position + 1)
        try:
            value, end = decode(text, position)
        except json.JSONDecodeError:
            return pieces, True
        pieces.append((value, text[position:end]))
        position = after_space(end)
    return pieces, after_space(position + 1) != len(text)


def read(path: Path, content: bytes, window: int) -> tuple[list[Element], Reject | None]:
    path.write_bytes(content)
    meter = Meter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_CHUNK", window)
        items = list(read_array(path, meter))
    assert 0 <= meter.done <= len(content)
    damage = items.pop() if items and isinstance(items[-1], Reject) else None
    elements = [item for item in items if isinstance(item, Element)]
    assert [element.index for element in elements] == list(range(len(items)))
    assert damage is not None or meter.done == len(content)
    return elements, damage


def same(path: Path, content: bytes, window: int) -> None:
    """The reader and the oracle agree on everything."""
    elements, damage = read(path, content, window)
    expected, is_damaged = oracle(content)
    # As text, for NaN is not NaN and 1 is True.
    assert repr([element.value for element in elements]) == repr([value for value, _ in expected])
    printable = [text.encode("utf-8", "backslashreplace").decode() for _, text in expected]
    assert [element.raw for element in elements] == printable
    assert (damage is not None) == is_damaged
    if damage is not None:
        assert damage.position == len(expected)
        text = content.decode("utf-8-sig", "surrogateescape").encode("utf-8", "backslashreplace").decode()
        assert text.endswith(damage.raw)
    for element in elements:
        if element.is_plain:
            json.dumps(element.value, ensure_ascii=False, allow_nan=False).encode()


def document(values: list[Any], indent: int | str | None, separators: tuple[str, str] | None, escape: bool) -> bytes:
    text = json.dumps(values, indent=indent, separators=separators, ensure_ascii=escape)
    return text.encode("utf-8", "surrogatepass")


DOCUMENTS = st.builds(document, ELEMENTS, INDENTS, SEPARATORS, st.booleans())


@RELAXED
@given(content=DOCUMENTS, window=WINDOWS)
def test_any_array_is_read_as_the_standard_library_reads_it(content: bytes, window: int, path: Path) -> None:
    same(path, content, window)


@settings(RELAXED, max_examples=examples(20))
@given(content=DOCUMENTS.filter(lambda content: len(content) < 200), window=WINDOWS)
def test_an_array_cut_at_every_byte(content: bytes, window: int, path: Path) -> None:
    for cut in range(len(content)):
        same(path, content[:cut], window)


@RELAXED
@given(content=DOCUMENTS, window=WINDOWS, data=st.data())
def test_a_byte_that_changed(content: bytes, window: int, data: st.DataObject, path: Path) -> None:
    position = data.draw(st.integers(0, len(content) - 1))
    value = data.draw(st.integers(0, 255) | st.sampled_from(b'{}[]",: \\'))
    same(path, content[:position] + bytes([value]) + content[position + 1 :], window)


@RELAXED
@given(content=DOCUMENTS, bit=st.integers(0, 7), window=WINDOWS, data=st.data())
def test_a_bit_that_flipped(content: bytes, bit: int, window: int, data: st.DataObject, path: Path) -> None:
    position = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[position] ^ 1 << bit])
    same(path, content[:position] + flipped + content[position + 1 :], window)


ROWS = [{"a": n, "text": '}, {"a": ' * (n % 3), "list": [{"a": n}]} for n in range(40)]


@pytest.mark.parametrize("window", [64, 300, 1 << 20])
@pytest.mark.parametrize("separators", [None, (",", ":")], ids=["spaced", "compact"])
@pytest.mark.parametrize("odd", ["NaN", '"\\ud800"', "9" * 5000, "[" * 1500 + "]" * 1500])
def test_odd_elements_cost_themselves_alone(path: Path, window: int, separators: Any, odd: str) -> None:
    """False boundaries stand inside texts and lists; every seventh element is for the scanner."""
    rows = [row | ({"odd": 0.125} if n % 7 == 3 else {}) for n, row in enumerate(ROWS)]
    text = json.dumps(rows, separators=separators).replace("0.125", odd)
    elements, damage = read(path, text.encode(), window)
    assert damage is None
    assert len(elements) == len(rows)
    for n, element in enumerate(elements):
        if n % 7 == 3:
            assert odd in element.raw
            assert not element.is_plain
        else:
            assert element.value == rows[n]
            assert json.loads(element.raw) == rows[n]


def test_whole_windows_are_decoded_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scanner is asked for the first element and for the end, the decoder once a window: not once an element."""
    scanned: list[int] = []
    decoded: list[int] = []
    scan, compared = json_array._ArrayReader._scan_next, json_array.Rewriter.compare
    monkeypatch.setattr(json_array._ArrayReader, "_scan_next", lambda reader: scanned.append(1) or scan(reader))

    def count(rewriter: json_array.Rewriter, text: bytes, value: Any) -> tuple[bool, bool]:
        decoded.append(len(text))
        return compared(rewriter, text, value)

    monkeypatch.setattr(json_array.Rewriter, "compare", count)
    elements, _ = read(path, json.dumps(ROWS, indent=2).encode(), 1024)
    assert [element.value for element in elements] == ROWS
    assert all(element.is_plain for element in elements[1:])
    assert len(scanned) == 2
    assert len(decoded) < len(ROWS) / 4
    assert max(decoded) < 3 * 1024


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the window whenever it grew."""
    counts: list[int] = []
    grow = json_array._ByteWindow.grow

    def measured(window: Any) -> bool:
        grown = grow(window)
        counts.append(len(window.content))
        return grown

    monkeypatch.setattr(json_array._ByteWindow, "grow", measured)
    return counts


def test_elements_without_a_boundary_do_not_pile_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, widths: list[int]
) -> None:
    """A boundary that was learned from two elements and never comes again: the window stays small."""
    rows = ['{"a": 1}', '{"a": 2}', *(f'{{"b": {n}, "text": "{"x" * 500}"}}' for n in range(100))]
    monkeypatch.setattr(json_array, "_WIDEST", 2)
    elements, damage = read(path, ("[" + ",".join(rows) + "]").encode(), 256)
    assert damage is None
    assert len(elements) == len(rows)
    assert max(widths) < 4096


def test_damage_is_not_read_to_its_end(path: Path, monkeypatch: pytest.MonkeyPatch, widths: list[int]) -> None:
    monkeypatch.setattr(records, "RAW_LIMIT", 1000)
    elements, damage = read(path, json.dumps(ROWS).encode()[:-1] + b" x" * 50_000, 256)
    assert len(elements) == len(ROWS)
    assert damage is not None
    assert damage.raw.endswith("[cut at 16 MB]")
    assert max(widths) < 8192


@pytest.mark.parametrize("odd", ["", ', "odd": NaN'])
def test_looks_for_boundaries_that_never_come_get_rare(path: Path, monkeypatch: pytest.MonkeyPatch, odd: str) -> None:
    """Each goes through the whole window: one an element would take time in the square of the window."""
    rows = [f'{{"key {n}": {n}{odd}}}' for n in range(1000)]
    looks: list[int] = []
    look = json_array._ArrayReader._find_end
    monkeypatch.setattr(json_array._ArrayReader, "_find_end", lambda reader, at: looks.append(at) or look(reader, at))
    elements, damage = read(path, ("[" + ",".join(rows) + "]").encode(), 256)
    assert damage is None
    assert [element.raw for element in elements] == rows
    assert len(looks) < len(rows) / 8
