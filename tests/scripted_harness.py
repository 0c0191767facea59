"""A harness process that answers by what the candidate's own comments say: a real process, the real protocol, no torch.

Drives the agent's tests of git, journal and kills without waiting for a compiler. A candidate's first lines are read:
Drives the tests of git, journal and kills without waiting for a compiler. A candidate's first lines are read:
given to `verify`: `# model: 0.9` multiplies it, `# not applied` leaves it unreached. Every judgement is counted in
`judged.txt` of the session.
"""

import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path


def main() -> int:
    boot = json.loads(os.environ.pop("OVERNIGHT_BOOT"))
    sys.path[:] = boot["path"]
    if boot["cores"]:
        os.sched_setaffinity(0, boot["cores"])
    with os.fdopen(boot["request_fd"]) as requests, os.fdopen(boot["reply_fd"], "w") as replies:
        for line in requests:
            message = json.loads(line)
            try:
                kind, body = "reply", VERBS[message["name"]](message["body"])
            except RefusedError as error:
                kind, body = "failure", {"kind": error.args[0], "message": error.args[1], "trace": ""}
            replies.write(json.dumps({"kind": kind, "name": message["name"], "body": body}) + "\n")
            replies.flush()
    return 0


class RefusedError(Exception):
    """kind, message"""


def profile(body):
    script = json.loads(Path(body["model"]["reference"].rpartition(":")[0]).read_text().splitlines()[0].lstrip("# "))
    time.sleep(script.get("slow", 0))
    if "refuse" in script:
        raise RefusedError("input", script["refuse"])
    keys, members = script.get("keys", {}), script.get("members", {})
    targets = [
        {**target(name, share, members.get(name, [])), "key": keys.get(name, name)}
        for name, share in script["targets"].items()
    ]
    folder = Path(body["folder"]) / "targets"
    folder.mkdir(parents=True, exist_ok=True)
    for one in targets:
        (folder / f"{one['id']}.json").write_text(json.dumps(one))
    return {
        "model": "Scripted", "device": "cpu", "device_name": "scripted", "mode": "eager", "total_ms": 1.0,
        "idle_share": 0.1, "uncaptured_share": 0.0, "targets": targets, "peaks": {}, "notes": [], "fingerprint": {},
    }  # fmt: skip


def target(name, share, members):
    return {
        "id": name, "kind": "pointwise", "title": f"{name} x2", "key": name, "inputs": [], "constants": {},
        "outputs": [], "graph": [], "results": [], "reference": "", "bindings": [],
        "call_sites": [{"graph": 0, "module": f"layers.{i}", "source": "model.py:1"} for i in range(2)],
        "flops": 0, "bytes": 0, "time_us": 1000 * share / 2, "floor_us": 100 * share / 2, "share": share,
        "members": members,
    }  # fmt: skip


def judge(body):
    source = body["source"]
    if body["target"] == "softmax":  # the preflight's throwaway kernel
        return verdict_on(body, "discard", "1")
    with (Path(body["target"]).parents[1] / "judged.txt").open("a") as log:
        log.write(hashlib.sha256(source.encode()).hexdigest() + "\n")
    if match := re.search(r"^# slow: ([\d.]+)$", source, re.MULTILINE):
        time.sleep(float(match[1]))
    if re.search(r"^# dies$", source, re.MULTILINE):
        os._exit(7)
    folder = Path(body["target"]).parents[1]
    if match := re.search(r"^# meets: (\d+)$", source, re.MULTILINE):
        meet(folder, int(match[1]))
    if sick(folder):
        os._exit(8)
    status, _, speedup = (re.search(r"^# verdict: (.+)$", source, re.MULTILINE) or ["", "keep 1.5"])[1].partition(" ")
    if status == "ours":
        raise RefusedError("ours", "the judge has a bug")
    if "def kernel_fn(*inputs, **constants)" in source:  # the original, judged to see whether the machine is well
        status = "crash" if (folder / "originals_crash").exists() else "discard"
    return verdict_on(body, status, speedup)


def verdict_on(body, status, speedup):
    source, guard = body["source"], None
    if status in {"unjudgeable", "unreliable"}:
        status, guard = "environment", status
    accepted = status in {"keep", "discard"}
    ratio = float(speedup or 1)
    timing = {
        "eager_us": 12.0, "incumbent_us": 10.0, "candidate_us": 10.0 / ratio, "speedup_vs_pytorch": 1.2 * ratio,
        "speedup_vs_best": ratio, "ci_low": ratio * 0.99, "ci_high": ratio * 1.01, "noise": 0.01, "incumbent": "eager",
        "ratios": [[ratio * (1 + 0.002 * quad) for quad in range(-3, 4)] for _process in range(3)],
    }  # fmt: skip
    stages = ["smoke", "shapes", "stability", "determinism", "edge", "benchmark"]
    return {
        "accepted": accepted, "status": status, "target": Path(body["target"]).stem, "device": body["device"],
        "stage": None if accepted else "shapes", "guard": guard, "detail": f"scripted {guard or status}",
        "blame": None if accepted else "environment" if status == "environment" else "candidate",
        "stages": {name: {"status": "pass" if accepted else "not_run", "seconds": 0.0} for name in stages},
        "timing": timing if accepted else None, "sandbox": [],
        "kernel_sha256": hashlib.sha256(source.encode()).hexdigest(),
    }  # fmt: skip


def meet(folder, count):
    """Wait until that many judges are here at once."""
    (folder / f"here-{os.getpid()}").touch()
    until = time.monotonic() + 30
    while len(list(folder.glob("here-*"))) < count:
        if time.monotonic() > until:
            raise RefusedError("environment", "nobody came")
        time.sleep(0.01)


def sick(folder):
    """Whether the device of this process is one that a test has broken."""
    return (folder / f"broken-{min(os.sched_getaffinity(0))}").exists()


def describe(_body):
    log = Path("/proc/self/fd/1").readlink()
    if sick(log.parent):
        os._exit(8)
    return {}


def model_time(kernels):
    ours = 1.0
    for kernel in kernels:
        factor = re.search(r"^# model: ([\d.]+)$", kernel["source"], re.MULTILINE)
        ours *= float(factor[1]) if factor else 0.9
    return ours


def verify(body):
    applied, ours, outputs_ok = {}, model_time(body["kernels"]), True
    for kernel in body["kernels"]:
        source = kernel["source"]
        applied[Path(kernel["target"]).stem] = 0 if "# not applied" in source else 2
        outputs_ok &= "# breaks the model" not in source
    before = body.get("before")
    gain = None if before is None else model_time(before) / ours
    modes = {"overnight": ours, "eager": 1.2, "compile": 1.0}
    return {
        "model": "Scripted", "device": "cpu", "device_name": "scripted",
        "modes": [
            {"mode": name, "median_ms": ms, "ci_low": ms * 0.999, "ci_high": ms * 1.001, "peak_memory_mb": None}
            for name, ms in modes.items()
        ],
        "outputs_ok": outputs_ok, "max_error": 0.0, "faster": ours < 1.0, "model_speedup": 1.0 / ours,
        "model_speedup_vs_eager": 1.2 / ours, "sites": {"applied": sum(applied.values()), "fallback": 0},
        "applied": applied,
        "versus": {
            name: {"ratio": ms / ours, "low": ms / ours * 0.998, "high": ms / ours * 1.002}
            for name, ms in modes.items() if name != "overnight"
        },
        "newest": gain and {"ratio": gain, "low": gain * 0.999, "high": gain * 1.001},
    }  # fmt: skip


VERBS = {
    "profile": profile,
    "judge": judge,
    "verify": verify,
    "sandbox": lambda _body: {"layers": []},
    "describe": describe,
}

if __name__ == "__main__":
    raise SystemExit(main())
