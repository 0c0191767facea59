"""What follows from a verdict and from a measurement of the whole model. Pure."""

import ast
import hashlib
from collections.abc import Iterable
from functools import lru_cache

from agent.records import Candidate, Experiment, RowStatus
from harness.records import ModeMeasurement, Status, Verdict, VerifyReport

ROW_OF_VERDICT = {
    Status.KEEP: RowStatus.KEEP,
    Status.DISCARD: RowStatus.DISCARD,
    Status.INCORRECT: RowStatus.INCORRECT,
    Status.CRASH: RowStatus.CRASH,
    Status.TIMEOUT: RowStatus.TIMEOUT,
    Status.CHEAT: RowStatus.CHEAT,
    Status.ENVIRONMENT: RowStatus.ENVIRONMENT,
}
ISOLATED_ONLY = "isolated only"
DEVICE_LOST = "the device was lost"


def row_status(verdict: Verdict) -> RowStatus:
    """The row's status before the model is measured."""
    return ROW_OF_VERDICT[verdict.status]


@lru_cache(maxsize=4096)
def fingerprint(source: str) -> str:
    """A hash of what a kernel file says: comments, layout and docstrings do not count."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return hashlib.sha256(source.strip().encode("utf-8", "replace")).hexdigest()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            node.body = [part for part in node.body if not _is_text(part)] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()


def duplicate_of(candidate: Candidate | None, experiments: Iterable[Experiment]) -> Experiment | None:
    """An earlier experiment of the target that already settled this very kernel, or is about to."""
    if candidate is None:
        return None
    mine = fingerprint(candidate.source)
    for one in experiments:
        unsettled = {RowStatus.ENVIRONMENT, RowStatus.INTERRUPTED, RowStatus.INVALID_REPLY, RowStatus.DUPLICATE}
        settled = one.status not in unsettled and (one.verdict is not None or one.status is None)
        if one.target == candidate.target and settled and one.candidate and fingerprint(one.candidate.source) == mine:
            return one
    return None


def isolated_only(target: str, report: VerifyReport) -> str | None:
    """Why a keep does not help the model, None when it may stay.

    The model with it and without it were timed interleaved in one process; what the clock cannot tell apart stays only
    when the better half of the evidence is on its side.
    """
    if not report.outputs_ok:
        return f"with it the model's outputs differ (max error {report.max_error:.3g})"
    if report.applied.get(target, 0) == 0:
        return "it is reached by no call site of the model"
    gain = report.newest
    if gain is None:
        return "the model could not be timed with and without it"
    if gain.ratio < 1.0:
        return f"with it the model runs at {gain.ratio:.4f} of its speed ({gain.low:.4f} to {gain.high:.4f})"
    return None


def _mode(report: VerifyReport, name: str) -> ModeMeasurement | None:
    return next((mode for mode in report.modes if mode.mode == name), None)


def _median(report: VerifyReport, name: str) -> float | None:
    mode = _mode(report, name)
    return mode.median_ms if mode else None


def model_ms(report: VerifyReport) -> float | None:
    """The model's median with what is kept, milliseconds."""
    return _median(report, "overnight")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
