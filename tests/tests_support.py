"""Records that several tests of the agent build."""

from harness.records import StageName, StageResult, StageStatus, Status, Target, Timing, Verdict


def verdict(status: Status = Status.KEEP, speedup: float = 1.25) -> Verdict:
    """A whole verdict."""
    accepted = status in {Status.KEEP, Status.DISCARD}
    timing = Timing(12.0, 10.0, 10.0 / speedup, 1.5, speedup, speedup * 0.98, speedup * 1.02, 0.01)
    stages = {name: StageResult(StageStatus.PASS, 0.1) for name in StageName}
    return Verdict(
        accepted, status, "t", "cpu", None, None, "why", None, stages, timing if accepted else None, (), "0" * 64
    )


def target(name: str, share: float, *, floor: float = 0.1, members: tuple[str, ...] = ()) -> Target:
    """A target whose sites take `share` of a 1 ms model, with its floor at that part of its time."""
    return Target(
        id=name, kind="pointwise", title=name, key=name, inputs=(), constants={}, outputs=(), graph=(), results=(),
        reference="", bindings=(), call_sites=(), flops=0, bytes=0, time_us=1000 * share, floor_us=1000 * share * floor,
        share=share, members=members,
    )  # fmt: skip
