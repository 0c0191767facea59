"""Doubts about a win on a GPU, where the worker reports device times itself: is it there on the judge's own clock, and
is the incumbent only slower because the candidate's process disturbs it?

Both are asked of a would-be keep alone, since they take longer than the races. Neither sees what lasts less than the
judge's clock can tell from nothing (READ_SLACK_S over at least CLAIMED_S of claimed savings).
"""

from harness.lanes import Lane, Pair
from harness.records import Status
from harness.stages import Refusal
from harness.workshop import Sample

CLAIMED_S, MOST_REPLAYS, FEWEST_REPLAYS = 2e-3, 300, 20
WALL_ROUNDS, WALL_TRIES = 4, 3
WALL_SHARE, WALL_SLACK_S = 0.5, 2e-4
CALM_ROUNDS, CALM_RUNS = 4, 4
DISTURBED_ABOVE = 1.05


def doubt(a: Lane, b: Lane, pair: Pair) -> None:
    """Raise Refusal where the win of B over A rests on a false clock or on a disturbed incumbent."""
    if b.device != "cuda" or pair.b_seconds >= pair.a_seconds:
        return
    clock_confirms(a, b, pair)
    undisturbed(a, b)


def clock_confirms(a: Lane, b: Lane, pair: Pair) -> None:
    """What B claims to save must pass on the judge's clock: enough replays at once that it weighs milliseconds."""
    claimed = (pair.a_seconds - pair.b_seconds) * b.sets
    replays = min(MOST_REPLAYS, max(FEWEST_REPLAYS, round(CLAIMED_S / claimed)))
    walls: tuple[list[float], list[float]] = ([], [])
    for _ in range(WALL_TRIES):
        for _ in range(WALL_ROUNDS):
            for lane, seconds in zip((a, b), walls, strict=True):
                seconds.append(_run(lane, replays).seconds)
        saved = min(walls[0]) - min(walls[1])
        if saved >= WALL_SHARE * claimed * replays - WALL_SLACK_S:
            return
    of = f"of {claimed * replays * 1e3:.2f} ms that it claims to save in {replays} runs"
    said = f"{of}, {saved * 1e3:.2f} ms are saved on the judge's clock"
    raise Refusal(Status.CHEAT, said, "clock")


def undisturbed(a: Lane, b: Lane) -> None:
    """A must not be slower beside B's living processes than beside stopped ones."""
    beside: tuple[list[float], list[float]] = ([], [])
    for _ in range(CALM_ROUNDS):
        beside[0].append(_fastest(a))
        b.pause()
        try:
            beside[1].append(_fastest(a))
        finally:
            b.resume()
    if min(beside[0]) > DISTURBED_ABOVE * min(beside[1]):
        slower = min(beside[0]) / min(beside[1]) - 1
        said = f"the incumbent is {slower:.0%} slower while the candidate's processes are awake"
        raise Refusal(Status.CHEAT, said, "disturbed_incumbent")


def _fastest(lane: Lane) -> float:
    samples = [_run(lane, 1) for _ in range(CALM_RUNS)]
    return min(sample.device_seconds or sample.seconds for sample in samples)


def _run(lane: Lane, repeats: int) -> Sample:
    lane.rewrite()
    return lane.run(repeats)
