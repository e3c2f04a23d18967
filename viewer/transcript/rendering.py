"""Draw a foreign text as what it is: prose, code, a diff, a checklist, a terminal's output, JSON, or a tool call.

`detect` names the kind of a text, `render` returns its markup. Markup holds elements and classes that are listed in
this file; nh3 removes all others. It has no script, style, link, image or identifier. Addresses of links are words.

All work is bounded: a text that is too long, too deep or too slow for its kind is shown as it was written, with a note.
"""

import difflib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from html import escape, unescape
from itertools import pairwise, takewhile
from typing import Any, Literal

import nh3
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String

from viewer import plain
from viewer.transcript.formulas import draw_formulas
from viewer.transcript.terminal import Line, resolve_screen

Kind = Literal["text", "markdown", "json", "terminal", "code", "diff", "call"]
MAX_LENGTH: Mapping[str, int] = {"markdown": 50_000, "code": 50_000}
"""Maximum characters of a text of these kinds that is drawn."""
MAX_OTHER = 100_000
"""Maximum characters of a text of the other kinds."""
MAX_LINE = 2000
"""Maximum characters of a line of code that gets colours."""
MAX_PIECES = 1200
"""Maximum coloured pieces, leaves of JSON, elements of formulas, and blocks of prose of a text."""
MAX_ROWS = 1500
"""Maximum rows of a diff, and lines of code with numbers."""
MAX_SHORT = 80
"""Maximum characters of JSON that stands in one line."""
MAX_LEVELS = 40
"""Maximum levels of JSON and of prose."""
SECONDS = 0.5
"""Maximum CPU time of a text, in seconds; a busy machine does not change what is drawn."""

RESULT_ROLES = ("tool", "function")
_PROSE_ROLES = ("user", "assistant", "system", "developer", "reasoning")
_READERS = frozenset(("read", "read_file", "view", "open", "open_file", "cat", "view_file", "fs_read", "readfile"))
_TERMINAL = re.compile("\x1b[\\[\\]]|[^\r\n]\r(?!\r*\n)|[^\b]\b")
_DIFF = re.compile(r"^(?:diff --git |--- \S.*\n\+\+\+ \S.*\n@@ -\d|\*\*\* Begin Patch[ \r]*$)", re.MULTILINE)
_FILE_NAME = re.compile(r"[\w/-]{1,200}\.\w{1,8}\b")
_NUMBERED = re.compile("^ {0,8}(\\d{1,7})(\u2192|\t|:|\\|)(.*)$")
_MARKDOWN_LINE = re.compile(r"\s*(?:#{1,6} |[-*+] |\d{1,3}[.)] |> |\|)|.{0,200}(?:\*\*\w|\]\(|`\w)")
_LAYOUT_LINE = re.compile(
    r"(?: {2,}|\t+)(?!\s|[-*+>|] |\d{1,3}[.)] )|Traceback \(most recent call last\)|[-dl][-rwxst]{9}[ .]"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d|(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)[: |]|(?:\$|>>>|\.\.\.) "
    r"|(?:def|class|import|from|export|const|function|return) .*[\w:;{)]$|#(?:!|include)|@\w+$|[^\\]*[;{}]$"
)
_FENCE = re.compile(r"^ {0,3}(?:```|~~~)", re.MULTILINE)
_CODE_COMMENT = re.compile(r"^#(?: .*)?\n#(?: .*)?$", re.MULTILINE)
_LIST_LINE = re.compile(r"[-*+] |\d{1,3}[.)] ")
_HEAD = 4000
"""Characters at the beginning of a text in which a diff begins."""


class _TooLargeError(Exception):
    """A text has more parts, or takes more time, than its kind may."""


@dataclass(slots=True)
class _Budget:
    """What a text may still cost."""

    pieces: int = MAX_PIECES
    deadline: float = field(default_factory=lambda: time.thread_time() + SECONDS)

    def check_time(self) -> None:
        if time.thread_time() > self.deadline:
            raise _TooLargeError


def detect(text: str, role: str = "", tool: str = "") -> Kind:
    """Return the kind of a full text.

    Args:
        text: the text.
        role: the role of its message; `call` for the arguments of a tool call, `reasoning` for reasoning.
        tool: the name of the tool whose result it is.
    """
    is_own = role in ("assistant", "reasoning")
    if role == "call" and parse_document(text) is not None:
        return "call"
    if _DIFF.match(text.lstrip()) or (role not in _PROSE_ROLES and _DIFF.search(text[:_HEAD])):
        return "diff"
    if _TERMINAL.search(text):
        return "terminal"
    if parse_document(text) is not None:
        return "json"
    is_file = role in RESULT_ROLES and tool.lower() in _READERS
    if is_file or (not is_own and _count_numbered(text.split("\n", 60)[:60]) >= 0.5):
        return "code"
    return "markdown" if role in _PROSE_ROLES and not _is_layout(text[:_HEAD]) else "text"


def _is_layout(text: str) -> bool:
    """Return whether a text is code, a log or another output, whose lines and indentation Markdown would destroy."""
    if _FENCE.search(text):
        return False
    lines = [line for line in text.split("\n") if line.strip()]
    prose = [line for line in lines if not _LAYOUT_LINE.match(line)]
    signs, layout = sum(map(bool, map(_MARKDOWN_LINE.match, prose))), len(lines) - len(prose)
    return layout >= max(2, len(lines) / 2, 4 * signs) or _CODE_COMMENT.search(text) is not None


def find_language(arguments: str) -> str:
    """Return the language of the file that the arguments of a tool call name; empty if there is none."""
    document = parse_document(arguments)
    return _name_language(_get_path(document)) if isinstance(document, dict) else ""


def parse_document(text: str) -> Any:
    """Return a JSON object or list; None for other, longer or deeper text."""
    beginning = text[:64].lstrip()[:1]
    if beginning not in ("{", "[") or len(text) > MAX_OTHER:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


@lru_cache(maxsize=256)
def render(text: str, kind: Kind, language: str = "") -> str:
    """Return the markup of a text; empty for a text that has no other form than as it was written.

    Args:
        text: the text, control characters included.
        kind: how to draw it (`detect`).
        language: the language of code (`find_language`).
    """
    if kind == "text" or not text:
        return ""
    formulas: list[tuple[str, str]] = []
    budget = _Budget()
    markup = None
    if len(text) <= MAX_LENGTH.get(kind, MAX_OTHER):
        with suppress(_TooLargeError, RecursionError):
            is_prose = kind == "markdown"
            markup = _draw_markdown(text, formulas, budget) if is_prose else _DRAWERS[kind](text, language, budget)
    if markup is None:
        note = "Shown as it was written: too long or too complex to format."
        return f'<div class="note">{note}</div><pre>\n{_escape(text)}</pre>'
    cleaned = _build_cleaner().clean(markup)
    return _FORMULA_SIGN.sub(lambda match: formulas[int(match[1])][1], cleaned) if formulas else cleaned


def _escape(text: str) -> str:
    return escape(plain.visible(text), quote=False)


def _wrap(tag: str, name: str, markup: str) -> str:
    return f'<{tag} class="{name}">{markup}</{tag}>'


def _wrap_block(tag: str, name: str, markup: str) -> str:
    """Return a block that scrolls where it is long; the keyboard then reaches it."""
    is_long = len(markup) > 1500 or markup.count("\n") + markup.count('class="row') > 12
    # A browser drops the first line break of a `pre`.
    inner = f"\n{markup}" if tag == "pre" else markup
    return f'<{tag} class="{name}"{" tabindex=0" if is_long else ""}>{inner}</{tag}>'


_PLAIN_TAGS = "p br hr em strong s blockquote ul ol li code pre table thead tbody tr th td div span details summary b"
_CLASSES = frozenset(
    (
        *("prose", "heading", "level1", "level2", "level3", "level4", "level5", "level6", "address", "formula", "note"),
        *("table", "left", "right", "center", "tasks", "task", "box", "done", "doing", "open", "dropped", "checklist"),
        *("code", "line", "gutter", "diff", "file", "counts", "row", "added", "removed", "same", "hunk", "gap", "meta"),
        *("tree", "entry", "key", "string", "long", "literal", "figure", "count", "call", "part", "terminal"),
        *("bold", "dim", "slanted", "underlined", "reversed", *(f"fg{n}" for n in range(16))),
        *(f"bg{n}" for n in range(16)),
        *(f"hl-{name}" for name in ("keyword", "name", "builtin", "string", "number", "comment", "variable", "error")),
    )
)


@cache
def _build_cleaner() -> nh3.Cleaner:
    tags = set(_PLAIN_TAGS.split())
    return nh3.Cleaner(
        tags=tags,
        attributes={"details": {"open"}, "ol": {"start"}, **{tag: {"tabindex"} for tag in ("pre", "div", "span")}},
        allowed_classes={tag: set(_CLASSES) for tag in tags},
        url_schemes=set(),
        link_rel=None,
    )


# ---------------------------------------------------------------- prose

_FORMULA_SIGN = re.compile("\ufdd0(\\d+)\ufdd1")


def _draw_markdown(text: str, formulas: list[tuple[str, str]], budget: _Budget) -> str:
    source = plain.visible(text).replace("\ufdd0", "\ufffd")
    drawn = draw_formulas(source)
    if drawn:
        # A formula is one letter to Markdown, so no sign in it is markup; code gets its source back.
        longest_first = sorted(drawn, key=len, reverse=True)

        def replace_formula(match: re.Match[str]) -> str:
            markup = drawn[match[0]]
            budget.pieces -= markup.count("</")
            if budget.pieces <= 0:
                return match[0]
            is_block = ' display="block"' in markup.partition(">")[0]
            formulas.append((match[0], _wrap("span", "formula", markup) if is_block else markup))
            return f"\ufdd0{len(formulas) - 1}\ufdd1"

        source = re.sub("|".join(map(re.escape, longest_first)), replace_formula, source)
    markdown = _build_markdown()
    environment = {"budget": budget, "formulas": formulas}
    tokens = _keep_layout(markdown.parse(source, environment), source.split("\n"))
    # The parser drops what is nested deeper than it may.
    if max((token.level for token in tokens), default=0) >= MAX_LEVELS - 1:
        raise _TooLargeError
    end, rest = _cut_tokens(tokens)
    markup = markdown.renderer.render(tokens[:end], markdown.options, environment)
    if end < len(tokens):
        lines = "\n".join(source.split("\n")[rest:])
        markup += f'<div class="note">The rest as it was written.</div><pre>{_restore(lines, environment)}</pre>'
    return _wrap("div", "prose", markup)


def _keep_layout(tokens: Sequence[Token], lines: Sequence[str]) -> list[Token]:
    """Return tokens in which paragraphs with indented lines, such as tracebacks, are code, so that they keep them."""
    rewritten_tokens: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        is_paragraph = token.type == "paragraph_open" and token.level == 0
        first, end = token.map or (0, 0)
        block = lines[first:end] if is_paragraph else []
        is_layout = any(line.startswith(("  ", "\t")) for line in block[1:])
        if is_layout and not any(_FORMULA_SIGN.search(line) or _LIST_LINE.match(line) for line in block):
            rewritten_tokens.append(Token("code_block", "code", 0, content="\n".join(block), map=[first, end]))
        else:
            rewritten_tokens += tokens[position : position + (3 if is_paragraph else 1)]
        position += 3 if is_paragraph else 1
    return rewritten_tokens


def _cut_tokens(tokens: Sequence[Token]) -> tuple[int, int]:
    """Return how many tokens fit in `MAX_PIECES`, whole blocks only, and the first line of the others."""
    size = 0
    block, line = 0, 0
    for position, token in enumerate(tokens):
        if token.level == 0 and token.nesting >= 0 and token.map:
            block, line = position, token.map[0]
        size += 1 + len(token.children or ())
        if size > 3 * MAX_PIECES:
            return block, line
    return len(tokens), 0


@cache
def _build_markdown() -> MarkdownIt:
    options = {"html": False, "breaks": True, "linkify": False, "maxNesting": MAX_LEVELS}
    markdown = MarkdownIt("commonmark", options).enable(["table", "strikethrough"])

    def check_time(state: Any, *_: Any) -> bool:
        state.env["budget"].check_time()
        return False

    # A rule that never applies: the parsers ask it at every line and every sign.
    markdown.block.ruler.before("code", "time", check_time)
    markdown.inline.ruler.before("text", "time", check_time)
    markdown.inline.ruler.before("emphasis", "name", _keep_name)
    for name, rule in _RULES.items():
        markdown.add_render_rule(name, rule)
    return markdown


_NAME = re.compile(r"__[^\W_]\w{0,100}__(?!\w)|_[^\W_]{1,50}(?:_{1,2}[^\W_]{1,50}){1,20}_(?!\w)")
"""A name of a program whose underscores are no emphasis, such as `__init__`."""


def _keep_name(state: Any, silent: bool) -> bool:
    match = _NAME.match(state.src, state.pos)
    if match is None:
        return False
    if not silent:
        state.pending += match[0]
    state.pos = match.end()
    return True


Rule = Callable[..., str]
"""A rule of markdown-it: (renderer, tokens, index, options, environment) -> markup."""


def _restore(text: str, environment: Mapping[str, Any]) -> str:
    """Return text in which formulas are as they were written, escaped."""
    formulas = environment["formulas"]
    return _escape(_FORMULA_SIGN.sub(lambda match: formulas[int(match[1])][0], text))


def _draw_words(_: Any, tokens: Sequence[Token], index: int, _options: Any, environment: Any) -> str:
    token = tokens[index]
    if token.type == "code_inline":
        return f"<code>{_restore(token.content, environment)}</code>"
    if token.type == "image":
        return _escape(f"![{token.content}]({token.attrs.get('src', '')})")
    return _escape(token.content)


def _draw_fence(_: Any, tokens: Sequence[Token], index: int, _options: Any, environment: Any) -> str:
    code = unescape(_restore(tokens[index].content, environment)).removesuffix("\n")
    language = tokens[index].info.strip().split(" ")[0].strip("{}.").lower()
    budget: _Budget = environment["budget"]
    if language in ("diff", "patch") or (not language and _DIFF.match(code)):
        return _draw_diff(code, "", budget)
    return _draw_code(code, language, budget)


def _draw_link(_: Any, tokens: Sequence[Token], index: int, *_more: Any) -> str:
    """Return the address of a link behind its words, as words."""
    link = next(token for token in reversed(tokens[:index]) if token.type == "link_open")
    address = _wrap("span", "address", f"({_escape(str(link.attrs.get('href', '')))})")
    return "" if link.markup == "autolink" else f" {address}"


def _draw_cell(_: Any, tokens: Sequence[Token], index: int, *_more: Any) -> str:
    side = re.search("left|right|center", str(tokens[index].attrs.get("style", "")))
    return f'<{tokens[index].tag} class="{side[0]}">' if side else f"<{tokens[index].tag}>"


_TASK = re.compile(r"^\[([ xX])\][ \t]+")


def _draw_list_item(_: Any, tokens: Sequence[Token], index: int, *_more: Any) -> str:
    """Return the beginning of an item; `[ ]` and `[x]` at its beginning are a box."""
    inline = tokens[index + 2] if len(tokens) > index + 2 else None
    if inline is None or inline.type != "inline" or not inline.children:
        return "<li>"
    words = inline.children[0]
    task = _TASK.match(words.content) if words.type == "text" else None
    if task is None:
        return "<li>"
    words.content = words.content[task.end() :]
    return _begin_task("open" if task[1] == " " else "done")


def _begin_task(state: str) -> str:
    """Return the beginning of an item with a box, and the state as a word for readers of the text alone."""
    return f'<li class="task {state}"><span class="box {state}">{_STATES[state]}</span> '


_STATES = {"open": "to do", "doing": "in progress", "done": "done", "dropped": "dropped"}
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("text", "code_inline", "image"), _draw_words),
    **dict.fromkeys(("fence", "code_block"), _draw_fence),
    **dict.fromkeys(("th_open", "td_open"), _draw_cell),
    "link_open": lambda *_: "",
    "link_close": _draw_link,
    "list_item_open": _draw_list_item,
    "table_open": lambda *_: '<div class="table" tabindex=0><table>',
    "table_close": lambda *_: "</table></div>",
    "heading_open": lambda _, tokens, index, *_more: f'<p class="heading level{tokens[index].tag[1:]}">',
    "heading_close": lambda *_: "</p>",
}


# ---------------------------------------------------------------- code

# A short list: each language is a set of regular expressions that foreign text meets.
_OWN_NAMES = "python bash json yaml toml html xml css sql c cpp java go rust ruby php lua javascript typescript jsx tsx"
_OTHER_NAMES = {
    **dict.fromkeys(("py", "python3", "pyi", "ipython"), "python"),
    **dict.fromkeys(("sh", "shell", "zsh", "console"), "bash"),
    **dict.fromkeys(("js", "mjs", "cjs", "node"), "javascript"),
    **dict.fromkeys(("cc", "hpp", "c++"), "cpp"),
    **dict.fromkeys(("pytb", "traceback"), "pytb"),
    **{"ts": "typescript", "yml": "yaml", "htm": "html", "svg": "xml", "h": "c", "rs": "rust", "rb": "ruby"},
    **{"jsonl": "json", "ipynb": "json", "golang": "go", "postgresql": "sql", "ini": "ini", "cfg": "ini"},
}
_LANGUAGES: Mapping[str, str] = {name: name for name in _OWN_NAMES.split()} | _OTHER_NAMES
_STYLES = (
    *((Comment, "comment"), (String, "string"), (Number, "number"), (Keyword.Constant, "number"), (Keyword, "keyword")),
    *((Operator.Word, "keyword"), (Name.Builtin, "builtin"), (Name.Function, "name"), (Name.Class, "name")),
    *((Name.Decorator, "name"), (Name.Tag, "keyword"), (Name.Attribute, "variable"), (Name.Variable, "variable")),
    *((Name.Exception, "builtin"), (Generic.Error, "error"), (Generic.Traceback, "error")),
)


def _name_language(path: str) -> str:
    """Return the language of a path by its ending; empty if it is unknown."""
    name = path.replace("\\", "/").rpartition("/")[2].lower()
    return _LANGUAGES.get(name.rpartition(".")[2], "")


def _lex(code: str, language: str, budget: _Budget) -> list[Line]:
    """Return the lines of a text with classes; without them if the language is unknown or the text is too large."""
    lexer_name = _LANGUAGES.get(language)
    lines = code.split("\n")
    if lexer_name is None or len(code) > MAX_LENGTH["code"] or max(map(len, lines)) > MAX_LINE:
        return [[("", line)] for line in lines]
    lexed: list[Line] = [[]]
    for start, token, text in get_lexer_by_name(lexer_name).get_tokens_unprocessed(code):
        is_over = budget.pieces <= 0 or time.thread_time() > budget.deadline
        name = "" if is_over else _get_style(token)
        for position, part in enumerate((code[start:] if is_over else text).split("\n")):
            if position:
                lexed.append([])
            line = lexed[-1]
            # White space takes the class of what it follows.
            if line and part and (line[-1][0] == name or not part.strip()):
                line[-1] = (line[-1][0], line[-1][1] + part)
            elif part:
                line.append((name if part.strip() else "", part))
                budget.pieces -= bool(name)
        if is_over:
            break
    return lexed


@lru_cache(maxsize=500)
def _get_style(token: Any) -> str:
    return next((f"hl-{name}" for kind, name in _STYLES if token in kind), "")


def _write_line(line: Line, marked: tuple[int, int] = (0, 0)) -> str:
    """Return the markup of a line, with the characters from the first to the second position of `marked` in `<b>`."""
    first, end = marked
    markup = []
    position = 0
    for name, text in line:
        cuts = [min(max(cut - position, 0), len(text)) for cut in (first, end)]
        head, middle, tail = text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]
        inner = _escape(head) + (f"<b>{_escape(middle)}</b>" if middle else "") + _escape(tail)
        markup.append(_wrap("span", name, inner) if name else inner)
        position += len(text)
    return "".join(markup)


def _draw_code(code: str, language: str, budget: _Budget) -> str:
    return _wrap_block("pre", "code", "\n".join(_write_line(line) for line in _lex(code, language, budget)))


def _count_numbered(lines: Sequence[str]) -> float:
    """Return the share of the lines with a number, rising by 1 from one to the next; 1 in the form of Claude Code."""
    numbers = [int(match[1]) for line in lines if (match := _NUMBERED.match(line))]
    rises = sum(after == before + 1 for before, after in pairwise(numbers))
    return 1.0 if re.match(" +\\d{1,7}\u2192", lines[0]) else rises / max(len(lines) - 1, 2)


def _draw_file(text: str, language: str, budget: _Budget) -> str:
    """Return the lines of a file that a tool read; numbers that the tool wrote are a gutter."""
    lines = text.split("\n")
    if _count_numbered(lines) < 0.3 or len(lines) > MAX_ROWS:
        return _draw_code(text, language, budget)
    matches = [_NUMBERED.match(line) for line in lines]
    if not language and (path := _FILE_NAME.search(lines[0][:MAX_LINE])):
        language = _name_language(path[0])
    code = "\n".join(match[3].replace("\r", "") for match in matches if match)
    lexed = iter(_lex(code, language, budget))
    rows = [
        _wrap("span", "gutter", match[1]) + _write_line(next(lexed)) if match else _wrap("span", "meta", _escape(line))
        for line, match in zip(lines, matches, strict=True)
    ]
    return _wrap_block("pre", "code", "\n".join(rows))


# ---------------------------------------------------------------- diffs

Row = tuple[str, str]
"""A row of a diff: `+`, `-`, a space, `@` (hunk), `.` (gap), `f` (file) or `m` (other text), and its text."""
_ROW_NAMES = {"+": "added", "-": "removed", " ": "same", "@": "hunk", ".": "gap", "f": "file", "m": "meta"}
_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_FILE = re.compile(r"\*\*\* (?:Update|Add|Delete) File: (.*)|diff --git a/.* b/(.*)|(?:\+\+\+|---) (?:[ab]/)?([^\t]*)")


def _parse_diff(text: str) -> Iterator[Row]:
    """Yield the rows of a unified diff, of git, or of the patch format that begins with `*** Begin Patch`."""
    lines = text.split("\n")
    path = ""
    # Lines of a hunk that are still to come; a patch without counts has as many as there are.
    old, new = 0, 0
    for position, line in enumerate(lines):
        is_heading = line.startswith(("*** ", "diff --git "))
        if is_heading or (old <= 0 and new <= 0 and line.startswith(("+++ ", "--- ", "index "))):
            old = new = len(lines) if line.startswith("*** ") and "File: " in line else 0
            match = _FILE.match(line)
            name = "" if match is None else next(name for name in match.groups() if name is not None).strip()
            # A file that is removed has its name in the line before.
            if name and name not in (path, "/dev/null"):
                path = name
                yield "f", path
        elif line.startswith("@@") and (old <= 0 or old > position or not line.startswith("@@ -")):
            hunk = _HUNK.match(line)
            old, new = (int(count or 1) for count in hunk.groups()) if hunk else (len(lines), len(lines))
            # A patch without counts has a sign where git has the lines' numbers.
            if line.strip("@ "):
                yield "@", line
            elif position and lines[position - 1][:1] in ("+", "-", " "):
                yield ".", ""
        elif (old > 0 or new > 0) and line[:1] in ("+", "-", " ", ""):
            old -= line[:1] != "+"
            new -= line[:1] != "-"
            if line or position + 1 < len(lines):
                yield line[:1] or " ", line[1:]
        elif line.strip():
            yield "m", line


def _compare_texts(old: str, new: str) -> Iterator[Row]:
    """Yield the rows of the difference of two texts."""
    before, after = old.split("\n"), new.split("\n")
    if max(len(before), len(after)) > MAX_ROWS:
        raise _TooLargeError
    is_first = True
    for line in difflib.unified_diff(before, after, lineterm="", n=3):
        if line.startswith("@@"):
            if not is_first:
                yield ".", ""
            is_first = False
        elif not is_first:
            yield line[0], line[1:]


def _draw_diff(text: str, _language: str, budget: _Budget) -> str:
    rows = list(_parse_diff(text.replace("\r\n", "\n")))
    starts = [position for position, (sign, _) in enumerate(rows) if sign == "f"]
    bounds = [0, *starts, len(rows)]
    parts = [rows[first:end] for first, end in pairwise(bounds) if end > first]
    return "".join(_draw_rows(part, budget) for part in parts)


def _draw_rows(rows: Sequence[Row], budget: _Budget) -> str:
    """Return the rows of one file, with the colours of its language, and changed words of changed lines marked."""
    if len(rows) > MAX_ROWS:
        raise _TooLargeError
    path = next((text for sign, text in rows if sign == "f"), "")
    language = _name_language(path)
    # Both versions are read as a whole, so that a string over several lines is one.
    lexed = {
        side: iter(_lex("\n".join(text for sign, text in rows if sign in signs), language, budget))
        for side, signs in (("old", "- "), ("new", "+ "))
    }
    marks = _mark_changes(rows)
    markup = []
    for position, (sign, text) in enumerate(rows):
        old = next(lexed["old"]) if sign in "- " else None
        new = next(lexed["new"]) if sign in "+ " else None
        line = new if new is not None else old if old is not None else [("", text)]
        inner = _write_line(line, marks.get(position, (0, 0)))
        if sign == "f":
            added, removed = (sum(row[0] == side for row in rows) for side in "+-")
            inner += " " + _wrap("span", "counts", f"+{added} \N{MINUS SIGN}{removed}")
        markup.append(_wrap("div", _ROW_NAMES[sign] if sign in "f" else f"row {_ROW_NAMES[sign]}", inner))
    return _wrap_block("div", "diff", "".join(markup))


def _mark_changes(rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """Return the changed characters of lines that replace a similar line, by the position of the row."""
    marks = {}
    signs = "".join(sign if sign in "+-" else " " for sign, _ in rows)
    for run in re.finditer("(-+)(\\++)", signs):
        for position in range(run.start(), run.start() + min(len(run[1]), len(run[2]))):
            old, new = rows[position][1], rows[position + len(run[1])][1]
            same = _count_common(old, new)
            same_end = _count_common(old[same:][::-1], new[same:][::-1])
            # Words are marked whole.
            while same and old[same - 1].isalnum() and (old[same : same + 1] + new[same : same + 1]).isalnum():
                same -= 1
            while same_end and old[-same_end].isalnum() and (old[:-same_end][-1:] + new[:-same_end][-1:]).isalnum():
                same_end -= 1
            if 3 * (same + same_end) >= max(len(old), len(new)):
                marks[position] = (same, len(old) - same_end)
                marks[position + len(run[1])] = (same, len(new) - same_end)
    return marks


def _count_common(old: str, new: str) -> int:
    """Return how many first characters two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _draw_terminal(text: str, _language: str, budget: _Budget) -> str:
    rows = []
    for line in resolve_screen(text, budget.check_time):
        budget.pieces -= len(line)
        rows.append(_write_line(line if budget.pieces > 0 else [("", "".join(words for _, words in line))]))
    return _wrap_block("pre", "terminal", "\n".join(rows))


# ---------------------------------------------------------------- JSON and calls


def _draw_document(text: str, _language: str, budget: _Budget) -> str:
    document = parse_document(text)
    if document is None:
        return _draw_code(text, "json", budget)
    return _draw_short(document, budget) or _draw_tree(document, 0, budget)


def _draw_tree(document: Any, depth: int, budget: _Budget) -> str:
    """Return an object or list as entries, each level indented by the same width."""
    entries = document.items() if isinstance(document, dict) else enumerate(document)
    rows = []
    for key, child in entries:
        if budget.pieces <= 0:
            rows.append(_wrap("div", "note", "The rest only as written."))
            break
        rows.append(_draw_entry(str(key), child, depth, budget))
    return _wrap("div", "tree", "".join(rows) or ("{}" if isinstance(document, dict) else "[]"))


def _draw_entry(key: str, child: Any, depth: int, budget: _Budget) -> str:
    budget.check_time()
    budget.pieces -= 1
    label = _wrap("span", "key", _escape(key))
    if not isinstance(child, dict | list) or not child:
        return _wrap("div", "entry", f"{label} {_draw_leaf(child)}")
    if short := _draw_short(child, budget):
        return _wrap("div", "entry", f"{label} {short}")
    if depth >= MAX_LEVELS:
        raise _TooLargeError
    noun = ("field" if isinstance(child, dict) else "entry") if len(child) == 1 else ""
    noun = noun or ("fields" if isinstance(child, dict) else "entries")
    opening = " open" if depth < 2 and len(child) <= 20 else ""
    count = _wrap("span", "count", f"{len(child):,} {noun}")
    inner = _draw_tree(child, depth + 1, budget)
    return f'<details class="entry"{opening}><summary>{label} {count}</summary>{inner}</details>'


def _draw_short(document: Any, budget: _Budget) -> str:
    """Return an object or list that fits in a line as JSON; empty for a longer one."""
    budget.check_time()
    text = json.dumps(document, ensure_ascii=False) if len(document) <= MAX_SHORT / 2 else ""
    is_line = 0 < len(text) <= MAX_SHORT and "\\n" not in text
    return _wrap("span", "line", _write_line(_lex(text, "json", budget)[0])) if is_line else ""


def _draw_leaf(leaf: Any) -> str:
    if isinstance(leaf, str):
        return _wrap_block("span", "string long" if "\n" in leaf else "string", _escape(leaf))
    if isinstance(leaf, bool) or leaf is None:
        return _wrap("span", "literal", json.dumps(leaf))
    if isinstance(leaf, dict | list):
        return _wrap("span", "literal", json.dumps(leaf))
    return _wrap("span", "figure", json.dumps(leaf))


_EDITS = (("old_string", "new_string"), ("old_str", "new_str"), ("search", "replace"), ("old_text", "new_text"))
_PATHS = ("file_path", "path", "filename", "file", "notebook_path", "target_file")
_TASKS = ("todos", "plan", "task_list", "todo_list", "items")
_TASK_TEXTS = ("content", "step", "title", "task", "text", "description")
_TASK_STATES = {
    **dict.fromkeys(("completed", "done", "complete", "finished"), "done"),
    **dict.fromkeys(("in_progress", "in progress", "active", "doing"), "doing"),
    **dict.fromkeys(("pending", "todo", "open", "not_started", "to do"), "open"),
    **dict.fromkeys(("cancelled", "canceled", "skipped", "dropped"), "dropped"),
}
_CODES = {
    **dict.fromkeys(("command", "cmd", "script", "bash_command"), "bash"),
    **dict.fromkeys(("code", "python", "python_code", "source_code"), "python"),
    **dict.fromkeys(("sql", "query", "sql_query"), "sql"),
    **dict.fromkeys(("content", "contents", "file_text", "new_source", "insert_text", "file_content"), ""),
}
"""Languages of arguments that are code; empty for those that have the language of the path."""


def _get_path(document: Mapping[str, Any]) -> str:
    paths = (document.get(name) for name in _PATHS)
    return next((path for path in paths if isinstance(path, str)), "")


def _draw_call(text: str, _language: str, budget: _Budget) -> str:
    """Return the arguments of a tool call: edits as diffs, plans as checklists, code as code, the rest as entries."""
    document = parse_document(text)
    if not isinstance(document, dict):
        return _draw_document(text, "", budget)
    path = _get_path(document)
    is_edit = any(_is_edit(document, pair) for pair in _EDITS) or "edits" in document
    # A diff has the path above it.
    drawn = {key for key in _PATHS if is_edit and document.get(key) == path}
    parts = []
    for key, argument in document.items():
        if key in drawn or budget.pieces <= 0:
            continue
        old_key, new_key = next((pair for pair in _EDITS if key in pair and _is_edit(document, pair)), ("", ""))
        if old_key:
            drawn |= {old_key, new_key}
            parts.append(_draw_edit(path, document[old_key], document[new_key], budget))
            continue
        edits = argument if key == "edits" and isinstance(argument, list) else []
        pairs = [pair for edit in edits for pair in _EDITS if isinstance(edit, dict) and _is_edit(edit, pair)]
        if edits and len(pairs) == len(edits):
            parts += [
                _draw_edit(path, edit[old], edit[new], budget) for edit, (old, new) in zip(edits, pairs, strict=True)
            ]
            continue
        parts.append(_draw_argument(document, key, argument, path, budget))
    return _wrap("div", "call", "".join(parts) or "{}")


def _is_edit(document: Mapping[str, Any], pair: tuple[str, str]) -> bool:
    return all(isinstance(document.get(key), str) for key in pair)


def _draw_edit(path: str, old: str, new: str, budget: _Budget) -> str:
    return _draw_rows([("f", path or "edit"), *_compare_texts(old, new)], budget)


def _draw_argument(document: Mapping[str, Any], key: str, argument: Any, path: str, budget: _Budget) -> str:
    """Return an argument by its name and shape; an entry of a tree if neither says more."""
    if key in _TASKS and (checklist := _draw_checklist(argument)):
        return checklist
    if isinstance(argument, list) and argument and all(isinstance(word, str) for word in argument):
        is_shell = len(argument) == 3 and argument[1] in ("-c", "-lc")
        if argument[0] == "apply_patch" or is_shell:
            key, argument = "command", argument[-1]
    if not isinstance(argument, str):
        return _draw_entry(key, argument, 0, budget)
    if _DIFF.search(argument[:_HEAD]) and key not in ("content", "file_text"):
        patch = argument[argument.index("*** Begin Patch") :] if "*** Begin Patch" in argument else argument
        return _draw_diff(patch, "", budget)
    language = _CODES.get(key)
    if language == "":
        language = _name_language(path) if path else None
    elif language == "python":
        language = str(document.get("language") or document.get("lang") or language).lower()
    elif language == "sql":
        language = "sql" if re.match(r"\s*(?:select|with|insert|update|create|explain)\b", argument, re.I) else None
    # The verb of an editor (`view`) is no command line.
    if language is None or (language == "bash" and path and argument.isidentifier()):
        return _draw_entry(key, argument, 0, budget)
    label = "" if language == "bash" else _wrap("span", "key", _escape(key))
    return _wrap("div", "part", label + _draw_code(argument, language, budget))


def _draw_checklist(tasks: Any) -> str:
    """Return a plan as a list with boxes; empty if it is no list of texts with states."""
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        return ""
    rows = []
    for task in tasks[:MAX_PIECES]:
        words = next((task[name] for name in _TASK_TEXTS if isinstance(task.get(name), str)), None)
        state = _TASK_STATES.get(str(task.get("status", "")).lower())
        if words is None or state is None:
            return ""
        rows.append(f"{_begin_task(state)}{_escape(words)}</li>")
    return _wrap("ul", "checklist", "".join(rows))


_DRAWERS: Mapping[Kind, Callable[[str, str, _Budget], str]] = {
    "json": _draw_document,
    "terminal": _draw_terminal,
    "code": _draw_file,
    "diff": _draw_diff,
    "call": _draw_call,
}
