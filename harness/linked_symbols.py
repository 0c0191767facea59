"""Which functions of other libraries a worker's own shared objects call, read from their ELF files by the judge."""

import struct
from contextlib import suppress
from pathlib import Path

from harness.worker.audit import LIBRARY_SYMBOL

MAX_FILE = 1 << 26
LOADERS = frozenset({"dlopen", "dlsym", "dlmopen"})
SYMBOL_TABLE, SYMBOL_BYTES = 11, 24  # SHT_DYNSYM, sizeof(Elf64_Sym)
SECTION = struct.Struct("<IIQQQQIIQQ")
BUILT_IN = ("/tmp/", "/dev/shm/")  # noqa: S108 - folders of the worker's own
"""A worker can write nowhere else, so that what it built lies there."""


def foreign_calls(pid: int) -> list[str]:
    """Library functions, and loaders that would hide them, that objects built by this process call."""
    found: set[str] = set()
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
        for path in sorted(paths):
            if path.startswith(BUILT_IN) and "site-packages" not in path:
                with suppress(OSError, struct.error, IndexError, ValueError):
                    found |= undefined_symbols(_bytes(Path(f"/proc/{pid}/root{path}")))
    return sorted(name for name in found if name in LOADERS or LIBRARY_SYMBOL.search(name))


def _bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_FILE)


def undefined_symbols(data: bytes) -> set[str]:
    """Names that a 64-bit little-endian ELF object takes from others; raises struct.error for what is none."""
    if data[:6] != b"\x7fELF\x02\x01":
        return set()
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [SECTION.unpack_from(data, offset + index * size) for index in range(count)]
    names: set[str] = set()
    for _, kind, _, _, start, length, link, *_ in sections:
        if kind == SYMBOL_TABLE:
            strings = sections[link][4]
            for place in range(start, start + length, SYMBOL_BYTES):
                name, _info, _other, section = struct.unpack_from("<IBBH", data, place)
                if name and not section:
                    end = data.index(b"\0", strings + name)
                    names.add(data[strings + name : end].decode("ascii", "replace"))
    return names
