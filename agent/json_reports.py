"""The JSON that `--json` prints: exactly the keys of the contracts, from the records."""

from collections.abc import Sequence
from typing import Any

from harness import wire
from harness.records import ModeMeasurement, ProfileReport, Target, TextAgreement, Verdict, VerifyReport

VERIFY_MODES = ("overnight", "eager", "eager_graph", "compile", "reduce_overhead", "max_autotune")


def profile_json(report: ProfileReport) -> dict[str, Any]:
    """`overnight profile --json`. Shares are fractions of `total_ms`; times are µs per call.

    `targets` is the disjoint cover: its shares sum to 1 at most. Fusions are nested under the first of their members.
    """
    return {
        "model": report.model,
        "device": report.device,
        "device_name": report.device_name,
        "mode": report.mode,
        "total_ms": report.total_ms,
        "idle_share": report.idle_share,
        "targets": _nested(report.targets),
        "uncaptured_share": report.uncaptured_share,
        "peaks": dict(report.peaks),
        "notes": list(report.notes),
    }


def _nested(targets: Sequence[Target]) -> list[dict[str, Any]]:
    cover = [{**_target(target), "fusions": list[Any]()} for target in targets if not target.members]
    by_id = {target["id"]: target for target in cover}
    for fusion in (target for target in targets if target.members):
        home = next((by_id[member] for member in fusion.members if member in by_id), None)
        if home is not None:
            home["fusions"].append(_target(fusion))
    return cover


def _target(target: Target) -> dict[str, Any]:
    return {
        "id": target.id,
        "kind": target.kind,
        "title": target.title,
        "call_sites": len(target.call_sites),
        "share": target.share,
        "time_us": target.time_us,
        "floor_us": target.floor_us,
        "flops": target.flops,
        "bytes": target.bytes,
        "model_gain": target.model_gain(),
        "launch_bound": target.launch_bound,
        "members": list(target.members),
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """`overnight check --json`."""
    data: dict[str, Any] = wire.to_data(verdict)
    return data


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """`overnight verify --json`: every mode is listed, one that was not run has nulls and a reason."""
    run = {mode.mode: mode for mode in report.modes}
    missing = {
        mode: ModeMeasurement(mode, None, None, None, None, "not asked for") for mode in VERIFY_MODES if mode not in run
    }
    return {
        "model": report.model,
        "device": report.device,
        "device_name": report.device_name,
        "modes": [wire.to_data((run | missing)[mode]) for mode in VERIFY_MODES],
        "outputs_ok": report.outputs_ok,
        "max_error": wire.to_data(report)["max_error"],
        "faster": report.faster,
        "model_speedup": report.model_speedup,
        "model_speedup_vs_eager": report.model_speedup_vs_eager,
        "sites": {"applied": report.sites.applied, "fallback": report.sites.fallback},
        "applied": dict(report.applied),
        "suspects": list(report.suspects),
        "detail": report.detail,
        "text": None if report.text is None else _text_json(report.text),
    }


def _text_json(text: TextAgreement) -> dict[str, Any]:
    """A language model's words: with the kernels against eager."""
    return {
        "ok": text.ok,
        "steps": text.steps,
        "top1_agreement": text.top1,
        "perplexity_eager": text.perplexity_eager,
        "perplexity": text.perplexity,
        "perplexity_change": text.perplexity_change,
    }
