"""What must not leave the machine in a text: keys, tokens and passwords, the user's own folders and name. Pure.

Known are the shapes that providers give their keys, whatever stands behind a name like `api_key =`, and the values of
this process's own secret-looking environment variables. A secret of no known shape that nothing names is not seen.
"""

import getpass
import re
from collections.abc import Callable, Mapping
from pathlib import Path

REMOVED = "[removed]"
SECRET_NAME = re.compile(r"API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_?KEY|AUTH", re.IGNORECASE)
SHORTEST_VALUE = 6
SHAPES = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}",  # OpenAI, Anthropic, OpenRouter
    r"\b(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bhf_[A-Za-z0-9]{16,}",
    r"\bgsk_[A-Za-z0-9]{16,}|\bxai-[A-Za-z0-9]{16,}|\bnvapi-[A-Za-z0-9_-]{16,}|\br8_[A-Za-z0-9]{16,}",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\bxox[abposr]-[A-Za-z0-9-]{10,}",
    r"\bpypi-[A-Za-z0-9_-]{16,}",
    r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*",  # JSON web tokens
    r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)",  # user:password@host
    r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/-]{12,}=*",
)
NAMED = re.compile(
    r"""(?ix)
        ( [\w-]* (?: api[_-]?key | access[_-]?key | secret | token | passw(?:or)?d | credential | private[_-]?key )
        [\w-]* \\?["']? \s* [:=] \s* \\?["'] ) ( [^"'\\\s]{6,} )""",
)
BARE = re.compile(
    r"(?m)^(\s*(?:export\s+)?[A-Z][A-Z0-9_]*(?:API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)[A-Z0-9_]*=)(\S+)"
)
_SHAPE = re.compile("|".join(f"(?:{shape})" for shape in SHAPES if not shape.startswith("(?i)")), re.DOTALL)
_BEARER = re.compile(SHAPES[-1])


def redactor(environment: Mapping[str, str], folders: Mapping[Path, str]) -> Callable[[str], str]:
    """A function that cleans a text; `folders` are shortened to the words given for them."""
    values = {value for name, value in environment.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST_VALUE}
    words = {str(path): shown for path, shown in folders.items() if len(str(path)) > 1}
    longest = sorted([*values, *words], key=len, reverse=True)
    known = re.compile("|".join(re.escape(text) for text in longest)) if longest else None

    def clean(text: str) -> str:
        if known:
            text = known.sub(lambda found: words.get(found[0], REMOVED), text)
        text = _BEARER.sub(REMOVED, _SHAPE.sub(REMOVED, text))
        return BARE.sub(rf"\1{REMOVED}", NAMED.sub(rf"\1{REMOVED}", text))

    return clean


def own_folders(root: Path) -> dict[Path, str]:
    """The workspace and the user's home, as others need to see them."""
    return {root: "WORKSPACE", Path.home(): "~", Path("/home") / getpass.getuser(): "~"}
