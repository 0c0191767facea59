"""Reading a kernel file out of what a language model answered: one unambiguous result, or a refusal that says why."""

import time

import pytest

from agent.proposers.replies import backend_of, read_reply

KERNEL = "import torch\n\n\ndef kernel_fn(x):\n    return x + 1\n"
OTHER = "import torch\n\n\ndef kernel_fn(x):\n    return x + 2\n"
IN_DOCSTRING = (
    'def kernel_fn(x):\n    """Adds one.\n\n```python\ny = kernel_fn(x)\n```\n\nand so on.\n    """\n    return x + 1\n'
)
BASE = "import torch\n\nBLOCK = 128\n\n\ndef kernel_fn(x):\n    y = x * 2\n    y = y + 1\n    return y\n"


def edit(search, replace, fence="", head="<<<<<<< SEARCH", foot=">>>>>>> REPLACE"):
    return f"{fence}\n{head}\n{search}\n=======\n{replace}\n{foot}\n{fence}\n"


@pytest.mark.parametrize(
    "reply",
    [
        f"HYPOTHESIS: less\n```python\n{KERNEL}```\n",
        f"```\n{KERNEL}```",
        f"```Python\n{KERNEL}\n```\n\nDone!",
        f"````python\n{KERNEL}````\n",
        f"~~~python\n{KERNEL}~~~\n",
        f"代码如下\uff1a```python\n{KERNEL}```。\n希望有帮助\uff01",
        f"下面是内核\uff1a\n```python\n{KERNEL}```。这样更快。\n",
        f"\uff40\uff40\uff40python\n{KERNEL}\uff40\uff40\uff40\n",
        f"```python\n{KERNEL}```".replace("\n", "\r\n"),
        f"```python\n{KERNEL}```".replace("\n", "\r"),
        f"\ufeff```python\n{KERNEL}```",
        f"First:\n```bash\npip list\n```\nThen:\n```python\n{KERNEL}```\nUse:\n```python\nkernel_fn(1)\n```\n",
        f"1. The file:\n\n   ```python\n{''.join('   ' + line for line in KERNEL.splitlines(keepends=True))}   ```\n",
        f"```python\n{KERNEL}",  # the closing fence forgotten
        f"```python\n{KERNEL.rstrip()}```",  # or on the last line of the code
        f"```python\n{KERNEL}```\nThe same again:\n```python\n# changed comment\n{KERNEL}```\n",
        f"```python title=kernel.py\n{KERNEL}```",
        KERNEL,
    ],
)
def test_a_whole_file_is_found_however_it_is_fenced(reply):
    reading = read_reply(reply)
    assert reading.source is not None, reading.reason
    names = {}
    exec(compile(reading.source.replace("import torch", ""), "k", "exec"), names)
    assert names["kernel_fn"](1) == 2


def test_a_fence_inside_a_docstring_does_not_end_the_file():
    assert read_reply(f"```python\n{IN_DOCSTRING}```\n").source == IN_DOCSTRING


def test_tabs_are_kept_where_they_are_python_and_spaces_where_they_are_mixed():
    tabbed = "def kernel_fn(x):\n\tif x:\n\t\treturn x\n\treturn x\n"
    assert read_reply(f"```python\n{tabbed}```").source == tabbed
    mixed = "def kernel_fn(x):\n\tif x:\n        return x\n\treturn x\n"
    assert "\t" not in read_reply(f"```python\n{mixed}```").source


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("", "empty"),
        ("  \n\n", "empty"),
        ("I am afraid that this kernel cannot be improved.", "no kernel_fn in the reply"),
        ("```python\nx = 1\n```", "no code block of the reply defines kernel_fn"),
        (f"```python\n{KERNEL}```\nor\n```python\n{OTHER}```", "2 different kernel files"),
        ("<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", "a web page"),
        ("<<<<<<< SEARCH\nx\n=======\ny\n", "lack a mark"),
        (edit("x = 1", "x = 2"), "none was shown"),
        (f"{edit('x = 1', 'x = 2')}\n```python\n{KERNEL}```", "both a whole file and SEARCH/REPLACE"),
    ],
)
def test_a_reply_without_one_clear_file_is_refused_with_the_reason(reply, words):
    reading = read_reply(reply)
    assert reading.source is None
    assert words in reading.reason


def test_a_file_that_is_shown_again_beside_the_new_one_does_not_make_it_unclear():
    reply = f"Before:\n```python\n{KERNEL}```\nAfter:\n```python\n{OTHER}```"
    assert read_reply(reply, base=KERNEL).source == OTHER


def test_code_that_does_not_parse_is_still_the_candidate_so_that_the_judge_says_why():
    broken = "def kernel_fn(x):\n    return x +\n"
    assert read_reply(f"```python\n{broken}```").source == broken


@pytest.mark.parametrize(
    ("search", "replace", "wanted"),
    [
        ("    y = x * 2", "    y = x * 3", "    y = x * 3\n    y = y + 1"),
        ("    y = x * 2   ", "    y = x * 3", "    y = x * 3\n"),
        ("y = x * 2\ny = y + 1", "y = x * 2 + 1", "    y = x * 2 + 1\n    return"),
        ("\ty = x * 2", "\ty = x * 3", "    y = x * 3\n    y = y + 1"),
        ("BLOCK = 128\n", "BLOCK = 256\n", "BLOCK = 256\n"),
        ("    y = y + 1\n", "", "    y = x * 2\n"),
    ],
)
@pytest.mark.parametrize("fence", ["", "```", "```python"])
def test_edits_apply_with_other_white_space_too(search, replace, wanted, fence):
    reading = read_reply(edit(search, replace, fence), BASE)
    assert reading.source is not None, reading.reason
    assert wanted in reading.source
    compile(reading.source, "k", "exec")


def test_several_edits_apply_in_order_and_crlf_does_not_matter():
    reply = (edit("BLOCK = 128", "BLOCK = 64") + edit("    y = y + 1", "    y = y + BLOCK")).replace("\n", "\r\n")
    source = read_reply(reply, BASE).source
    assert "BLOCK = 64" in source
    assert "y + BLOCK" in source
    assert "\r" not in source


@pytest.mark.parametrize(
    ("search", "replace", "words"),
    [
        ("    z = 0", "    z = 1", "is not in the file: 'z = 0'"),
        ("    y = ", "", "is not in the file"),
        ("", "x", "is empty"),
        ("    y = x * 2", "    y = x * 2", "leave the file as it was"),
        ("    y = x * 2", "    y = x * 2  # faster", "leave the file as it was"),
        ("def kernel_fn(x):", "def kernel(x):", "does not define kernel_fn any more"),
    ],
)
def test_an_edit_that_cannot_be_applied_is_refused_with_the_reason(search, replace, words):
    reading = read_reply(edit(search, replace), BASE)
    assert reading.source is None
    assert words in reading.reason


def test_an_edit_whose_text_occurs_twice_is_refused():
    base = BASE.replace("    y = y + 1\n", "    y = y + 1\n    y = y + 1\n")
    assert "occurs 2 times" in read_reply(edit("    y = y + 1", "    y = y"), base).reason
    assert "occurs 2 times" in read_reply(edit("y = y + 1", "y = y"), base).reason


@pytest.mark.parametrize(
    "reply",
    [
        "```python\n" + "x = 1\n" * 33_000 + KERNEL + "```\n",
        "```\n" * 50_000,
        "`" * 200_000,
        "word " * 40_000,
        "<<<<<<< SEARCH\n" * 14_000,
        "(" * 200_000,
        f"```python\n{'(' * 3000}\n```\n{KERNEL}",
        "~~~```" * 33_000,
    ],
    ids=["long file", "fences", "one long fence", "prose", "marks", "brackets", "deep", "mixed"],
)
def test_a_reply_of_200_kilobytes_is_read_quickly(reply):
    began = time.perf_counter()
    read_reply(reply, BASE)
    assert time.perf_counter() - began < 20  # a tenth of that on an idle core


def test_the_hypothesis_and_its_gain_are_kept_in_one_line():
    reply = f"**Hypothesis:** fewer\nEXPECTED GAIN: 1.3x\n```python\n{KERNEL}```"
    assert read_reply(reply).hypothesis == "fewer (expected 1.3x)"
    assert read_reply(f"假设\uff1a更少的读取\n```python\n{KERNEL}```").hypothesis == "更少的读取"


def test_the_backend_is_read_off_the_source():
    assert backend_of("import triton\n") == "triton"
    assert backend_of("SOURCE = '__global__ void f()'") == "cuda"
    assert backend_of("import ctypes") == "cpp"
    assert backend_of(KERNEL) == "library"
