"""Text that a candidate or a language model wrote, made harmless to read: nothing in it stays invisible. Pure.

HTML escaping is the templates' job (always on). Here control characters, terminal escapes, text-direction overrides
and halves of surrogate pairs become visible marks, and Markdown's own signs lose their meaning.
"""

import re

KEPT_CONTROLS = "\n\t"
DIRECTION_MARKS = "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff"
HIDDEN = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029{DIRECTION_MARKS}]")
MARKDOWN_SIGNS = re.compile(r"([\\`*\[\]#!|~$])")
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "://": "&#58;//", "www.": "www&#46;", "@": "&#64;"}
CUT = "\n… cut here: {left} more characters"


def visible(text: str) -> str:
    """The text with every hidden character written out, such as [U+202E]; line ends are plain newlines."""
    return HIDDEN.sub(lambda match: f"[U+{ord(match[0]):04X}]", text.replace("\r\n", "\n"))


def one_line(text: str, limit: int = 300) -> str:
    """The text as one visible line of at most `limit` characters."""
    words = " ".join(visible(text).split())
    return words if len(words) <= limit else words[: limit - 1] + "…"


def markdown_text(text: str, limit: int = 300) -> str:
    """One line in which no Markdown and no HTML is left that a viewer would act on, addresses included."""
    text = one_line(text, limit)
    for sign, entity in ENTITIES.items():
        text = text.replace(sign, entity)
    return MARKDOWN_SIGNS.sub(
        lambda match: match[0] if match.string[match.start() - 1] == "&" else "\\" + match[0], text
    )


def excerpt(text: str, limit: int) -> str:
    """The visible text, cut with a note where it is longer than `limit` characters."""
    shown = visible(text[:limit])
    return shown if len(text) <= limit else shown + CUT.format(left=len(text) - limit)
