"""What to believe in ten seconds: how much faster the model is, how sure that is, and against what. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from agent.morning.night import Night
from agent.records import RowStatus
from harness.records import ModelGain, VerifyReport

MODE_NAMES = {
    "overnight": "with the kept kernels",
    "eager": "PyTorch eager",
    "eager_graph": "eager in a CUDA graph",
    "compile": "torch.compile",
    "reduce_overhead": "torch.compile (reduce-overhead)",
    "max_autotune": "torch.compile (max-autotune)",
}


class Belief(StrEnum):
    """What the figures allow to say."""

    FASTER = "faster"
    NOT_FASTER = "not faster"
    BROKEN = "broken"
    UNVERIFIED = "unverified"
    NOTHING = "nothing kept"


@dataclass(frozen=True)
class Headline:
    """The first thing that is read."""

    belief: Belief
    sentence: str
    gain: ModelGain | None = None  # against `against`; its interval is 95%
    against: str = ""
    before_ms: float | None = None
    after_ms: float | None = None
    caveats: tuple[str, ...] = ()


def headline(night: Night) -> Headline:
    """The best that is known, and what speaks against it."""
    if night.verified is not None and (night.kept or night.verified.applied):
        return _of_verified(night, night.verified)
    if night.kept:
        return _of_last_keep(night)
    return Headline(Belief.NOTHING, _nothing(night), caveats=_lost(night))


def mode_name(mode: str) -> str:
    """A way to run the model, in words."""
    return MODE_NAMES.get(mode, mode)


def best_alternative(report: VerifyReport) -> tuple[str, ModelGain] | None:
    """The fastest other way to run the model, and how many times faster ours is than that."""
    if report.versus:
        mode = min(report.versus, key=lambda name: report.versus[name].ratio)
        return mode, report.versus[mode]
    medians = {one.mode: one for one in report.modes if one.median_ms is not None}
    ours = medians.pop("overnight", None)
    if ours is None or not medians:
        return None
    best = min(medians.values(), key=lambda one: one.median_ms or 0.0)
    assert best.median_ms is not None
    assert ours.median_ms is not None
    low = (best.ci_low or best.median_ms) / (ours.ci_high or ours.median_ms)
    high = (best.ci_high or best.median_ms) / (ours.ci_low or ours.median_ms)
    return best.mode, ModelGain(best.median_ms / ours.median_ms, low, high)


def median_ms(report: VerifyReport, mode: str) -> float | None:
    """The model's median time one way, milliseconds."""
    return next((one.median_ms for one in report.modes if one.mode == mode), None)


def _of_verified(night: Night, report: VerifyReport) -> Headline:
    if not report.outputs_ok:
        sentence = "Do not use it: with the kept kernels the model's outputs differ"
        return Headline(Belief.BROKEN, f"{sentence} (max error {report.max_error:.3g}).", caveats=_caveats(night))
    best = best_alternative(report)
    if best is None:
        return Headline(Belief.UNVERIFIED, "The model could not be timed.", caveats=_caveats(night))
    mode, gain = best
    belief = Belief.FASTER if gain.low > 1.0 else Belief.NOT_FASTER
    return Headline(
        belief=belief,
        sentence=_sentence(belief, gain, mode_name(mode)),
        gain=gain,
        against=mode_name(mode),
        before_ms=median_ms(report, mode),
        after_ms=median_ms(report, "overnight"),
        caveats=_caveats(night),
    )


def _sentence(belief: Belief, gain: ModelGain, against: str) -> str:
    if belief is Belief.FASTER:
        return f"The model runs {gain.ratio:.3g} times as fast as {against}, the fastest other way to run it."
    if gain.high < 1.0:
        return f"The model is slower: {gain.ratio:.3g} times as fast as {against}. Use that instead."
    return f"The model is not measurably faster than {against}."


def _of_last_keep(night: Night) -> Headline:
    last = night.kept[-1].experiment
    caveat = f"not verified as a whole: run `overnight verify {night.name}`"
    if last.model_speedup is None:
        return Headline(Belief.UNVERIFIED, "Kernels were kept; the model was not timed with them.", caveats=(caveat,))
    verb = "ran" if last.model_speedup >= 1 else "only ran"
    sentence = (
        f"The model {verb} {last.model_speedup:.3g} times as fast as the fastest other way when experiment"
        f" {last.number} was kept."
    )
    return Headline(Belief.UNVERIFIED, sentence, after_ms=last.model_ms, caveats=(caveat,))


def _nothing(night: Night) -> str:
    if night.profile is None:
        return "The model is still being profiled." if night.status.pid else "The model was never profiled."
    if not night.trials:
        return "Nothing was tried yet."
    return "Nothing was kept: the model runs as before."


def _lost(night: Night) -> tuple[str, ...]:
    """How much of the night says nothing about the kernels."""
    lost = sum(one.experiment.status is RowStatus.ENVIRONMENT for one in night.trials)
    said = f"{lost} of {len(night.trials)} experiments were lost to the machine, which failed or was too busy"
    return (said,) if lost else ()


def _caveats(night: Night) -> tuple[str, ...]:
    report = night.verified
    assert report is not None
    unreached = [target for target, sites in report.applied.items() if not sites]
    caveats = {
        **dict.fromkeys(_lost(night), True),
        f"kernels were kept after this was measured: run `overnight verify {night.name}`": night.verified_is_old,
        f"reached by no call site: {', '.join(unreached)}": unreached,
        f"{report.sites.fallback} call sites fell back to the original": report.sites.fallback,
        f"suspected: {', '.join(report.suspects)}": report.suspects,
    }
    return tuple(words for words, holds in caveats.items() if holds)
