"""Reading one kernel file out of what somebody answered: one unambiguous result, or a refusal that says why. Pure.

A reply holds either a whole file (in a fence, or bare) or SEARCH/REPLACE edits of the file that it was shown.
"""

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from agent.policy import fingerprint

FENCE = r"(?P<fence>`{3,}|~{3,})"
OPENING = re.compile(rf"^(?P<before>.*?){FENCE}[ \t]*(?P<info>[^`~]*)$")
CLOSING = re.compile(rf"^\s*{FENCE}(?P<after>.*)$")
SEARCH_MARK = re.compile(r"[ \t]*<{5,9}[ \t]*SEARCH")
MIDDLE_MARK = re.compile(r"[ \t]*={5,9}[ \t]*")
REPLACE_MARK = re.compile(r"[ \t]*>{5,9}[ \t]*REPLACE")
HYPOTHESIS = re.compile(
    r"^[^\w\n]*(?:hypothesis|\u5047\u8bbe)[^\w\n]*[:\uff1a]\s*(?P<text>.+)$", re.IGNORECASE | re.MULTILINE
)
GAIN = re.compile(
    r"^[^\w\n]*(?:expected (?:gain|speed-?up)|\u9884\u671f(?:\u6536\u76ca|\u52a0\u901f))[^\w\n]*[:\uff1a]"
    r"\s*(?P<text>.+)$",
    re.IGNORECASE | re.MULTILINE,
)
TRIPLE = re.compile(r"\"{3}|'{3}")
MOST_BLOCKS = 100
SAID_CHARS = 200
SHOWN_CHARS = 80


@dataclass(frozen=True)
class Reading:
    """What a reply comes to: a file, or the reason why it is none."""

    source: str | None
    reason: str = ""
    hypothesis: str = ""


@dataclass(frozen=True)
class _Block:
    text: str


def read_reply(reply: str, base: str | None = None) -> Reading:
    """The kernel file that a reply means; edits apply to `base`, the file that the prompt showed."""
    text = normalised(reply)
    said = hypothesis_in(text)
    if not text.strip():
        return Reading(None, "the reply was empty")
    edits, rest = edits_in(text.split("\n"))
    if edits is None:
        return Reading(None, "its SEARCH/REPLACE edits lack a mark: <<<<<<< SEARCH, =======, >>>>>>> REPLACE", said)
    whole = _whole_files(rest if edits else text, base)
    if edits and whole:
        return Reading(None, "the reply holds both a whole file and SEARCH/REPLACE edits: give one of them", said)
    if edits:
        return _edited(edits, base, said)
    if len(whole) > 1:
        return Reading(None, f"the reply holds {len(whole)} different kernel files: give exactly one", said)
    if whole:
        return Reading(whole[0], hypothesis=said)
    return Reading(None, _why_none(text), said)


def kernel_file_in(reply: str) -> str | None:
    """The kernel file in a reply, None when there is not exactly one."""
    return read_reply(reply).source


def normalised(reply: str) -> str:
    """Line ends as \\n, no byte order mark, no invisible characters that no file wants."""
    text = reply.replace("\r\n", "\n").replace("\r", "\n")
    text = text.replace("\uff40\uff40\uff40", "```")  # a fence typed with a Chinese keyboard
    return text.replace("\ufeff", "").replace("\u200b", "").replace("\u2028", "\n").replace("\x00", "")


def hypothesis_in(text: str) -> str:
    """The stated idea and the gain it expects, in one line; "" when there is none."""
    idea, gain = HYPOTHESIS.search(text), GAIN.search(text)
    words = " ".join(idea["text"].split()).strip("*_` ") if idea else ""
    if gain:
        words = f"{words} (expected {' '.join(gain['text'].split()).strip('*_` ')})"
    return words.strip()[:SAID_CHARS]


def backend_of(source: str) -> str:
    """What a kernel file is written in, by what it calls."""
    if "import triton" in source or "from triton" in source:
        return "triton"
    if re.search(r"\bnvcc\b|__global__", source):
        return "cuda"
    return "cpp" if re.search(r"\bg\+\+|\bctypes\b", source) else "library"


# Whole files


def _whole_files(text: str, base: str | None) -> list[str]:
    """The different kernel files in a reply; the file it was shown, repeated beside a new one, does not count."""
    blocks = list(_blocks(text.split("\n")))
    if not blocks:
        bare = mended(text)
        return [bare] if _defines_kernel(bare) and parses(bare) else []
    files = [mended(block.text) for block in blocks if _defines_kernel(mended(block.text))]
    if len(files) < 2:
        return files
    different = list({fingerprint(one): one for one in files}.values())
    if len(different) > 1 and base is not None:
        different = [one for one in different if fingerprint(one) != fingerprint(base)]
    return different


def _blocks(lines: Sequence[str]) -> Iterator[_Block]:
    """Fenced blocks in order."""
    index = found = 0
    while index < len(lines) and found < MOST_BLOCKS:
        opening = OPENING.match(lines[index])
        if opening is None or not _opens(opening):
            index += 1
            continue
        block, index = _block(lines, index + 1, opening["fence"])
        found += 1
        yield block


def _opens(opening: re.Match[str]) -> bool:
    """A fence opens a block at a line's start, after prose, or in a list; not between code and more code."""
    return len(opening["info"].split()) <= 4


def _block(lines: Sequence[str], start: int, fence: str) -> tuple[_Block, int]:
    """The block that begins at `start`, and the line after it. A fence within triple quotes ends nothing."""
    first: int | None = None
    quotes = 0
    for index in range(start, len(lines)):
        head = _closes(lines[index], fence)
        if head is not None:
            first = index if first is None else first
            if (quotes + len(TRIPLE.findall(head))) % 2 == 0:
                return _Block(_joined(lines, start, index, head)), index + 1
        quotes += len(TRIPLE.findall(lines[index]))
    if first is None:
        return _Block("\n".join(lines[start:]) + "\n"), len(lines)
    return _Block(_joined(lines, start, first, _closes(lines[first], fence) or "")), first + 1


def _joined(lines: Sequence[str], start: int, end: int, head: str) -> str:
    return "\n".join([*lines[start:end], *([head] if head.strip() else [])]) + "\n"


def _closes(line: str, fence: str) -> str | None:
    """The code before a closing fence on its line, None when the line closes nothing."""
    closing = CLOSING.match(line)
    if closing and closing["fence"][0] == fence[0] and len(closing["fence"]) >= len(fence):
        return ""
    tail = re.match(rf"^(?P<code>.*[^`~\s]){re.escape(fence)}\W*$", line)
    return tail["code"] if tail else None


def _defines_kernel(text: str) -> bool:
    return re.search(r"^(?:async )?def kernel_fn\b|^kernel_fn\s*=", text, re.MULTILINE) is not None


@lru_cache(maxsize=16)
def parses(text: str) -> bool:
    """Whether it is Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a stray backslash is the author's affair
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def mended(text: str) -> str:
    """The block as a file: out of its list's indentation, tabs as spaces where they are mixed."""
    if parses(text):
        return text
    attempts = [textwrap.dedent(text), *(textwrap.dedent(text.expandtabs(width)) for width in (4, 8))]
    return next((one for one in attempts if parses(one)), text)


def _why_none(text: str) -> str:
    opening = " ".join(text.split())[:SAID_CHARS]
    if re.match(r"\s*<(?:!doctype|html)", text, re.IGNORECASE):
        return f"the reply is a web page, not a kernel: {opening!r}"
    if re.search(r"[`~]{3,}", text):
        return f"no code block of the reply defines kernel_fn: {opening!r}"
    return f"no kernel_fn in the reply: {opening!r}"


# Edits


def edits_in(lines: Sequence[str]) -> tuple[list[tuple[str, str]] | None, str]:
    """The (old, new) texts of all edits, None when a mark is missing; and the reply without them."""
    edits: list[tuple[str, str]] = []
    rest: list[str] = []
    parts: list[list[str]] = []  # of the edit that is open: old lines, new lines
    for line in lines:
        if SEARCH_MARK.match(line) or REPLACE_MARK.match(line):
            opens = SEARCH_MARK.match(line) is not None
            if opens != (not parts) or (not opens and len(parts) != 2):
                return None, ""
            if not opens:
                edits.append(("".join(parts[0]), "".join(parts[1])))
            parts = [[]] if opens else []
        elif len(parts) == 1 and MIDDLE_MARK.fullmatch(line):
            parts.append([])
        else:
            (parts[-1] if parts else rest).append(line + "\n")
    return (None if parts else edits), "".join(rest)


def _edited(edits: Sequence[tuple[str, str]], base: str | None, said: str) -> Reading:
    if base is None:
        return Reading(None, "SEARCH/REPLACE edits need a file, and none was shown: give the whole file", said)
    source = normalised(base).rstrip("\n") + "\n"
    for number, (search, replace) in enumerate(edits, 1):
        place = _find(source, search)
        if isinstance(place, str):
            return Reading(None, f"edit {number} of {len(edits)}: {place}", said)
        start, end, indent = place
        source = source[:start] + _indented(replace, indent) + source[end:]
    source = mended(source)
    if not _defines_kernel(source):
        return Reading(None, "after the edits the file does not define kernel_fn any more", said)
    if fingerprint(source) == fingerprint(normalised(base)):
        return Reading(None, "the edits leave the file as it was", said)
    return Reading(source, hypothesis=said)


def _find(source: str, search: str) -> tuple[int, int, str] | str:
    """Where the SEARCH text stands, start and end and how it must be indented; or why it cannot be said."""
    if not search.strip():
        return "its SEARCH text is empty"
    exact = list(re.finditer("^" + re.escape(search), source, re.MULTILINE))
    if len(exact) == 1:
        return exact[0].start(), exact[0].end(), ""
    wanted = search.strip("\n").expandtabs(4).split("\n")
    for moved in (False, True):
        hits = _hits(source.expandtabs(4).split("\n"), wanted, moved=moved)
        if len(hits) > 1:
            return f"its SEARCH text occurs {len(hits)} times: give more lines around it"
        if hits:
            return _span(source, wanted, hits[0])
    first = next(line.strip() for line in wanted if line.strip())
    return f"its SEARCH text is not in the file: {first[:SHOWN_CHARS]!r}"


def _hits(lines: Sequence[str], wanted: Sequence[str], *, moved: bool) -> list[int]:
    """Where the lines stand, trailing space aside; `moved`: all by the same indentation."""
    places = range(len(lines) - len(wanted) + 1)
    return [at for at in places if _same(lines[at : at + len(wanted)], wanted, moved=moved)]


def _same(lines: Sequence[str], wanted: Sequence[str], *, moved: bool) -> bool:
    if not moved:
        return all(line.rstrip() == old.rstrip() for line, old in zip(lines, wanted, strict=True))
    if any(line.strip() != old.strip() for line, old in zip(lines, wanted, strict=True)):
        return False
    shifts = {_width(line) - _width(old) for line, old in zip(lines, wanted, strict=True) if old.strip()}
    return len(shifts) == 1 and min(shifts) >= 0


def _span(source: str, wanted: Sequence[str], at: int) -> tuple[int, int, str]:
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[:at]))
    shift = max(_width(line) - _width(old) for line, old in zip(lines[at:], wanted, strict=False) if old.strip())
    return start, start + sum(map(len, lines[at : at + len(wanted)])), " " * shift


def _width(line: str) -> int:
    expanded = line.expandtabs(4)
    return len(expanded) - len(expanded.lstrip())


def _indented(replace: str, indent: str) -> str:
    return textwrap.indent(replace.expandtabs(4), indent) if indent else replace
