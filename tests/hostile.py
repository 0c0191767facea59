"""A small real session whose candidates write everything that a page, a picture or a terminal could fall for."""

from workspaces import drive, make_workspace

SCRIPT = "<script>document.title='owned';fetch('http://evil.example/')</script>"
IMAGE = "<img src=http://evil.example/x.png onerror=alert(1)>"
BREAK_OUT = '"></pre></code></textarea></style></template>--><svg onload=alert(2)>'
FORMULA = "$\\frac{$"
ESCAPES = "\x1b]0;owned\x07\x1b[2J"
BACKWARDS = "\u202egnp.exe\u202c"
JINJA = "{{ 7 * 7 }}{% raw %}"
LINK = "![tracked](http://evil.example/t.png) [go](javascript:alert(3)) https://evil.example"
EVERYTHING = f"{SCRIPT} {IMAGE} {BREAK_OUT} {FORMULA} {ESCAPES} {BACKWARDS} {JINJA} {LINK}"


def kernel(verdict, *lines, name="x"):
    body = ["def kernel_fn(x):", "    rows = x.shape[0]", f"    return launch(x, rows, {name!r})", ""]
    return "\n".join([f"# verdict: {verdict}", *lines, *body])


def file_name(text):
    """What of a hostile description a file's name can hold."""
    return text.replace("/", "\u2215").replace("\x00", "")[:180]


def recordings(night_length=0):
    """Kept, discarded, failing and refused candidates on two targets; `night_length` more at the end."""
    named = {
        f"0001_rmsnorm_a__one pass {file_name(SCRIPT)}.py": kernel("keep 1.5", f"# {EVERYTHING}"),
        "0002_rmsnorm_a__vectorised rows.py": kernel(
            "keep 1.2", "# two rows at a time", f"# {SCRIPT}", name="vectorised"
        ),
        f"0003_softmax_b__{file_name(IMAGE + FORMULA)}.py": kernel("discard 0.9", f'"""{BREAK_OUT}"""'),
        f"0004_softmax_b__{file_name(LINK + JINJA)}.py": kernel(
            "incorrect", f"# {BACKWARDS}{ESCAPES}", name=f"{JINJA} {SCRIPT}"
        ),
        "0005_softmax_b__reply.py": f"INVALID REPLY: no kernel in {EVERYTHING}",
        "0006_softmax_b__online softmax.py": kernel("keep 1.3", "# one pass", name="online"),
        "0007_rmsnorm_a__crashes.py": kernel("crash", "# oh", name="broken"),
    }
    verdicts = ("discard 0.97", "incorrect", "discard 1.002", "crash", "timeout", "cheat", "keep 1.03")
    for number in range(8, 8 + night_length):
        target = ("rmsnorm_a", "softmax_b")[number % 2]
        named[f"{number:04d}_{target}__variant {number}.py"] = kernel(verdicts[number % 7], name=f"tile {number}")
    return named


def make_session(folder, night_length=0):
    """A workspace with a finished session `night`."""
    workspace = make_workspace(folder, recordings=recordings(night_length))
    drive(workspace, "run")
    return workspace
