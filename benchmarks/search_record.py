"""Judges settings of starter kernels once each with the real judge and stores the verdicts for search.py.

    python benchmarks/search_record.py --device cuda --seconds 100 [--output FILE] [OP ...]

The shipped setting comes first, then the grid in a seeded random order, the ops in turn, until the time is over. Not on
a machine that others work on: noise of half the time makes no landscape.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from agent.harness_client import HarnessProcess  # noqa: E402
from agent.search.settings import apply_setting, read_setting  # noqa: E402
from agent.verbs import JUDGE_TIMEOUT_S, Harness, scratch_folder  # noqa: E402
from harness.records import JudgeRequest, Verdict  # noqa: E402

OPS = ("softmax", "layernorm", "rmsnorm", "reduce")
FOLDERS = {"cpu": ("cpp",), "cuda": ("triton", "cuda")}
OUTPUT = ROOT / "benchmarks" / "search_real.json"
SEED = 8


def sources(op: str, device: str) -> Iterator[tuple[str, str, str]]:
    """Settings of the op's files, the shipped ones first: (backend, setting, file)."""
    shipped, others = [], []
    for backend in FOLDERS[device]:
        source = (ROOT / "kernels" / backend / f"{op}.py").read_text()
        setting = read_setting(source)
        assert setting is not None
        shipped.append((backend, setting.text, source))
        for chosen in itertools.product(*setting.choices.values()):
            one = setting
            for name, choice in zip(setting.choices, chosen, strict=True):
                one = one.with_choice(name, choice)
            if one.text != setting.text:
                others.append((backend, one.text, apply_setting(source, one)))
    random.Random(SEED).shuffle(others)
    yield from (*shipped, *others)


def main() -> int:
    """Judge in turn until the time is over, then store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", default=list(OPS))
    parser.add_argument("--device", default="cuda", choices=sorted(FOLDERS))
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    table: dict[str, list[dict[str, object]]] = {op: [] for op in options.ops}
    queues = {op: sources(op, options.device) for op in options.ops}
    end = time.monotonic() + options.seconds
    with scratch_folder() as folder:
        harness = Harness(ROOT, folder / "log.txt", lambda: False, lambda _name, _body: None)
        for op, queue in queues.items():  # a judge keeps one target's baselines warm: an op after the other
            share = time.monotonic() + (end - time.monotonic()) / (len(queues) - list(queues).index(op))
            with harness.start("judge") as judge:
                while time.monotonic() < share and (found := next(queue, None)) is not None:
                    table[op].append(judged(judge, op, options.device, *found))
                    print(op, table[op][-1], flush=True)
    options.output.write_text(json.dumps(table, indent=1) + "\n")
    return 0


def judged(judge: HarnessProcess, op: str, device: str, backend: str, setting: str, source: str) -> dict[str, object]:
    """One verdict as a row of the table."""
    started = time.monotonic()
    verdict = judge.call("judge", JudgeRequest(op, source, device=device), Verdict, timeout_s=JUDGE_TIMEOUT_S)
    timing = verdict.timing
    return {
        "backend": backend,
        "setting": setting,
        "accepted": verdict.accepted,
        "eager_us": timing.eager_us if timing else None,
        "incumbent_us": timing.incumbent_us if timing else None,
        "candidate_us": timing.candidate_us if timing else None,
        "ci": [timing.ci_low, timing.ci_high] if timing else None,
        "speedup_vs_best": timing.speedup_vs_best if timing else None,
        "noise": timing.noise if timing else None,
        "judge_s": round(time.monotonic() - started, 1),
        "detail": verdict.detail[:120],
    }


if __name__ == "__main__":
    raise SystemExit(main())
