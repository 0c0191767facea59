"""Every cheat of the corpus is refused for the reason it names, every honest kernel is accepted; on the CPU."""

import sys
from pathlib import Path

import pytest

from harness.judge import Judge, silent

sys.path.insert(0, str(Path(__file__).parent / "redteam"))

from corpus import specimens

BENCHMARK_GUARDS = {"benchmark", "timed_outputs", "challenge_chain", "deferred_work"}
QUICK_HONEST = {"library_softmax", "declared_error_bound", "exact_matmul", "serial_sum"}
CHEATS = [s for s in specimens("cheats") if s.device != "cuda"]
HONEST = [s for s in specimens("honest") if s.device != "cuda"]
TRIES = 3
"""Which guard meets a cheat first is now and then decided by the secret draws; that it is refused is not."""
SLOW_CHEATS = {"hangs_in_call", "cpp_static_cache", "static_buffer", "ignores_strides", "needs_contiguous"}


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.close()


def marked(specimen, *, slow):
    return pytest.param(specimen, id=specimen.name, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    "cheat", [marked(s, slow=s.expect in BENCHMARK_GUARDS or s.name in SLOW_CHEATS) for s in CHEATS]
)
def test_a_cheat_is_refused_for_the_reason_it_names(judge, cheat):
    verdicts = []
    while not (verdicts and cheat.caught(verdicts[-1])) and len(verdicts) < TRIES:
        verdicts.append(judge.judge(cheat.request(bench=cheat.expect in BENCHMARK_GUARDS, device="cpu"), silent))
    last, accepted = verdicts[-1], sum(verdict.accepted for verdict in verdicts)
    assert accepted <= cheat.by_chance, f"{cheat.name} was accepted"
    assert cheat.caught(last), f"expected {cheat.expect}, got {last.stage} / {last.guard}: {last.detail}"
    assert last.blame == "candidate"


@pytest.mark.parametrize("kernel", [marked(s, slow=s.name not in QUICK_HONEST) for s in HONEST])
def test_an_honest_kernel_is_accepted(judge, kernel):
    verdict = judge.judge(kernel.request(bench=False, device="cpu"), silent)
    assert verdict.accepted, f"{verdict.status} in {verdict.stage} ({verdict.guard}): {verdict.detail}"
