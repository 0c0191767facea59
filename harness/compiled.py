"""What a candidate's compiler said of its kernels, in sentences for whoever writes the next one.

Read from the Triton cache that a worker left. The files are the candidate's and may be forged: they are parsed here in
plain Python within limits, no tool runs on them, and what they say decides nothing.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_KERNELS = 6
MOST_BYTES = 8 << 20
ELF_MAGIC = b"\x7fELF\x02\x01"
TEXT, INFO = b".text.", b".nv.info"
# Records of .nv.info: format EIFMT_SVAL (0x04), then the attribute; each holds a function's index and a value.
SIZED, FRAME_SIZE, REGISTERS = 0x04, 0x0411, 0x042F
NAME = re.compile(r"[A-Za-z_]\w{0,60}")
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.\w+|::\w+)*?(?:\.v([248]))?\.(?:[busf])(8|16|32|64)\b")
PRODUCT = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")
WIDE_BITS, NARROW_BITS = 128, 16


@dataclass(frozen=True)
class CompiledKernel:
    """One kernel of a file: registers a thread, bytes of spills a thread, bytes of shared memory a block."""

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int
    narrow: int = 0  # global accesses of two bytes or less
    wide: int = 0  # of sixteen bytes or more
    products: str = ""  # the matrix instruction it uses

    def sentence(self) -> str:
        """For a prompt."""
        words = [f"{self.name}: {self.registers} registers a thread, {self.warps} warps"]
        words.append(f"{self.spilled_bytes} bytes a thread SPILLED" if self.spilled_bytes else "no spills")
        words.append(f"{self.shared_bytes} bytes of shared memory, {self.blocks()} blocks fit a processor")
        if self.narrow > self.wide:
            words.append(f"most global accesses are narrow ({self.narrow} of 2 bytes or less, {self.wide} of 16)")
        elif self.wide:
            words.append(f"global accesses are 16 bytes wide ({self.wide})")
        words.append(f"uses {self.products}" if self.products else "no matrix instructions")
        return "; ".join(words)

    def blocks(self) -> int:
        """Blocks that fit one processor of 64K registers, 2048 threads and 227 KB of shared memory (Hopper)."""
        threads = max(self.warps, 1) * 32
        by_registers = 65536 // max((self.registers + 7) // 8 * 8 * threads, 1)
        by_shared = 232448 // max(self.shared_bytes + 1024, 1)
        return max(0, min(32, 2048 // threads, by_registers, by_shared))


def compiled_kernels(folder: Path) -> tuple[CompiledKernel, ...]:
    """The kernels in a Triton cache below `folder`, by name; unreadable ones are left out."""
    found: dict[str, CompiledKernel] = {}
    for path in sorted(folder.rglob("*.cubin")):
        if len(found) >= MOST_KERNELS:
            break
        kernel = _kernel(path)
        if kernel:
            found.setdefault(kernel.name, kernel)
    return tuple(found.values())


def _kernel(cubin: Path) -> CompiledKernel | None:
    try:
        name, registers, spilled = resources(_bytes(cubin))
        said = json.loads(_bytes(cubin.with_suffix(".json")))
        shared, warps = int(said["shared"]), int(said["num_warps"])
    except (OSError, ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None
    if not NAME.fullmatch(name):
        return None
    narrow, wide, products = _habits(cubin.with_suffix(".ptx"))
    return CompiledKernel(name, registers, spilled, shared, warps, narrow, wide, products)


def resources(cubin: bytes) -> tuple[str, int, int]:
    """Name, registers a thread and bytes of stack a thread of a cubin's kernel. Raises ValueError, struct.error."""
    sections = dict(_sections(cubin))
    for name in sections:
        if name.startswith(TEXT):
            said = sections.get(INFO, b"")
            return name[len(TEXT) :].decode("ascii"), _largest(said, REGISTERS), _largest(said, FRAME_SIZE)
    raise ValueError("no kernel in it")


def _sections(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Each section's name and content (64-bit little-endian ELF)."""
    if not data.startswith(ELF_MAGIC):
        raise ValueError("no ELF file")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_at = struct.unpack_from("<HHH", data, 58)
    if table > len(data):
        raise ValueError("its table of sections lies outside it")
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + size * index) for index in range(min(count, 256))]
    if names_at >= len(headers) or any(max(header[4], header[5]) > len(data) for header in headers):
        raise ValueError("its sections lie outside it")
    names = data[headers[names_at][4] :][: headers[names_at][5]]
    for header in headers:
        name = names[header[0] :].partition(b"\0")[0]
        yield name, data[header[4] :][: header[5]]


def _largest(info: bytes, wanted: int) -> int:
    """The largest value of one attribute in `.nv.info`."""
    place, largest = 0, 0
    while place + 4 <= len(info):
        tag, size = struct.unpack_from(">H", info, place)[0], struct.unpack_from("<H", info, place + 2)[0]
        if tag == wanted and size == 8:
            largest = max(largest, struct.unpack_from("<I", info, place + 8)[0])
        place += 4 + (size if tag >> 8 == SIZED else 0)
    return largest


def _habits(ptx: Path) -> tuple[int, int, str]:
    """Narrow and wide global accesses in the PTX, and its matrix instruction."""
    try:
        text = _bytes(ptx).decode("utf-8", "replace")
    except (OSError, ValueError):
        return 0, 0, ""
    widths = [int(match[2] or 1) * int(match[3]) for match in ACCESS.finditer(text)]
    product = PRODUCT.search(text)
    return sum(w <= NARROW_BITS for w in widths), sum(w >= WIDE_BITS for w in widths), product[1] if product else ""


def _bytes(path: Path) -> bytes:
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} is too large")
    return path.read_bytes()
