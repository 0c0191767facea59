"""Reading a kernel file out of what somebody answered."""

import re

FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def kernel_file_in(reply: str) -> str | None:
    """The kernel file in a reply: its last fenced block that defines kernel_fn, or the whole reply when that does."""
    blocks = [block for block in FENCE.findall(reply.replace("\r\n", "\n")) if "def kernel_fn" in block]
    if blocks:
        return str(blocks[-1])
    return reply if re.search(r"^def kernel_fn\b", reply, re.MULTILINE) and "```" not in reply else None


def backend_of(source: str) -> str:
    """What a kernel file is written in, by what it calls."""
    if "import triton" in source or "from triton" in source:
        return "triton"
    if re.search(r"\bnvcc\b|__global__", source):
        return "cuda"
    return "cpp" if re.search(r"\bg\+\+|\bctypes\b", source) else "library"
