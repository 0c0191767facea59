"""The search against plain keep-or-revert, on the same budget and the same recorded proposals.

    python benchmarks/search.py [--seeds 10] [--first-seed 0] [--experiments 120]   the ablation
    python benchmarks/search.py --sweeps              what chooses the next TUNABLES (needs Optuna)

A simulated kernel is a real file whose TUNABLES, FAMILY and TRICKS decide its speed on a hidden landscape. What a
proposer answers is a fixed function of the target, the kernel that it was asked to work on and how often it was asked
about it: the recording. Both searches see the same answers to the same questions; they differ in what they ask.
`real` workloads are the verdicts of the real judge in search_real.json, one a setting (search_record.py).
"""

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from tests_support import target as make_target  # noqa: E402
from tests_support import verdict as make_verdict  # noqa: E402

from agent.policy import duplicate_of  # noqa: E402
from agent.ranking import is_open, standing  # noqa: E402
from agent.records import REST, Attempt, Candidate, Experiment, ExperimentState, Move, RowStatus  # noqa: E402
from agent.search.archive import archive  # noqa: E402
from agent.search.lines import SWEEP_AT, plan, stall  # noqa: E402
from agent.search.settings import apply_setting, read_setting  # noqa: E402
from agent.search.sweep import Trial, next_setting, sweep_of  # noqa: E402
from agent.search.targets import next_target  # noqa: E402
from harness.records import Status, Target  # noqa: E402

MIN_GAIN = 0.005
TUNABLES = {"BLOCK": (128, 256, 512, 1024, 2048), "WARPS": (1, 2, 4, 8), "STAGES": (1, 2, 3)}
BACKENDS = ("triton", "cuda", "cpp", "library")


@dataclass(frozen=True)
class World:
    """A workload: its targets, how fast a kernel really is (None: wrong), the noise of one judgement, its cost."""

    name: str
    targets: tuple[Target, ...]
    speed: Callable[[str, str], float | None]  # target id, source -> PyTorch's best time over the kernel's
    propose: Callable[[str, Sequence[str], str, int], str]  # target, parents, asked for, n-th time
    noise: float  # of a ratio, natural logarithm, one standard deviation
    cost_s: Mapping[str, float]


# Simulated landscapes


@dataclass(frozen=True)
class Landscape:
    """The hidden truth about one target's kernels.

    Families have ceilings; tricks help by themselves, or only together and hurt alone; tunables have an optimum that
    depends on the family. All in natural logarithms of time saved.
    """

    ceilings: tuple[float, ...]
    tricks: tuple[float, ...]
    pairs: Mapping[tuple[int, int], float]
    best: tuple[tuple[int, ...], ...]  # by family: the index of the best choice of each tunable
    weight: float
    wrong: float  # share of proposals that are wrong

    def saved(self, family: int, tricks: frozenset[int], chosen: Sequence[int]) -> float:
        """The natural logarithm of the speedup."""
        total = self.ceilings[family] + sum(self.tricks[one] for one in tricks)
        total += sum(value for pair, value in self.pairs.items() if set(pair) <= tricks)
        distance = sum(abs(one - other) for one, other in zip(chosen, self.best[family], strict=True))
        return total - self.weight * distance - 0.15 * (len(tricks) > 5)


def landscape(seed: int, *, rugged: float, weight: float, wrong: float) -> Landscape:
    """A landscape drawn from a seed."""
    draw = random.Random(seed)
    families, tricks = 4, 8
    pairs = {
        pair: draw.choice((-1, 1)) * draw.uniform(0.05, 0.25) * rugged
        for pair in itertools.combinations(range(tricks), 2)
        if draw.random() < 0.35
    }
    return Landscape(
        ceilings=tuple(draw.uniform(-0.35, 0.25) for _ in range(families)),
        tricks=tuple(draw.uniform(-0.06, 0.10) for _ in range(tricks)),
        pairs=pairs,
        best=tuple(tuple(draw.randrange(len(entry)) for entry in TUNABLES.values()) for _ in range(families)),
        weight=weight,
        wrong=wrong,
    )


def write(family: int, tricks: frozenset[int], chosen: Sequence[int], *, wrong: bool = False) -> str:
    """The file of a simulated kernel."""
    table = {
        name: [entry[index], *(one for one in entry if one != entry[index])]
        for (name, entry), index in zip(TUNABLES.items(), chosen, strict=True)
    }
    text = f"TUNABLES = {table!r}\nFAMILY = {family}\nTRICKS = {sorted(tricks)}\nWRONG = {wrong}\n"
    return text + "# @triton.jit\n" * (1 + family % 2) + "# cp.async\n" * (0 in tricks) + "# gridDim.x\n" * (family > 1)


def read(source: str) -> tuple[int, frozenset[int], tuple[int, ...], bool]:
    """What `write` wrote."""
    lines = dict(line.split(" = ", 1) for line in source.splitlines() if " = " in line)
    setting = read_setting(source.split("FAMILY", maxsplit=1)[0])
    assert setting is not None
    chosen = tuple(entry.index(setting.current[name]) for name, entry in TUNABLES.items())
    return int(lines["FAMILY"]), frozenset(json.loads(lines["TRICKS"])), chosen, lines["WRONG"] == "True"


def edited(parents: Sequence[str], draw: random.Random, wrong: float) -> str:
    """What a model writes when it is asked for a new kernel, an edit of one, or a merge of two."""
    if not parents:
        tricks = frozenset(one for one in range(8) if draw.random() < 0.2)
        return write(
            draw.randrange(4), tricks, [draw.randrange(len(e)) for e in TUNABLES.values()], wrong=draw.random() < wrong
        )
    family, tricks, chosen, _ = read(parents[0])
    if len(parents) == 2:
        other = read(parents[1])[1]
        tricks = frozenset(one for one in tricks | other if one in tricks & other or draw.random() < 0.7)
        return write(family, tricks, chosen, wrong=draw.random() < wrong)
    moves = draw.choices((1, 2), (0.75, 0.25))[0]
    changed = list(chosen)
    for _ in range(moves):
        if draw.random() < 0.35:
            place = draw.randrange(len(changed))
            changed[place] = draw.randrange(len(list(TUNABLES.values())[place]))
        else:
            tricks ^= {draw.randrange(8)}
    return write(family, tricks, changed, wrong=draw.random() < wrong)


def simulated(name: str, seed: int, *, targets: int, rugged: float, weight: float, wrong: float, noise: float) -> World:
    """A workload with its own landscapes; `seed` draws them and the recording."""
    draw = random.Random(f"{name} {seed}")
    shares = sorted((draw.paretovariate(1.2) for _ in range(targets)), reverse=True)
    ids = [f"t{number}" for number in range(targets)]
    truth = {one: landscape(draw.getrandbits(32), rugged=rugged, weight=weight, wrong=wrong) for one in ids}
    made = tuple(
        make_target(one, 0.9 * share / sum(shares), floor=draw.uniform(0.25, 0.6))
        for one, share in zip(ids, shares, strict=True)
    )
    floors = {one.id: one.floor_us / one.time_us for one in made}

    def speed(target: str, source: str) -> float | None:
        family, tricks, chosen, is_wrong = read(source)
        if is_wrong:
            return None
        return min(math.exp(truth[target].saved(family, tricks, chosen)), 1.0 / floors[target])

    def propose(target: str, parents: Sequence[str], asked: str, count: int) -> str:
        key = hashlib.sha256("\0".join([name, str(seed), target, asked, str(count), *parents]).encode()).digest()
        return edited(parents, random.Random(key), truth[target].wrong)

    return World(name, made, speed, propose, noise, {one: draw.uniform(5, 20) for one in ids})


def real(name: str, table: Mapping[str, list[dict]], ops: Sequence[str], seed: int) -> World:
    """A workload of recorded verdicts: every proposal is one of the recorded files, in an order that `seed` draws.

    An edit of a kernel is answered by recorded settings of the same file, nearest first; a new kernel by any file.
    """
    rows = {op: [row for row in table[op] if row["setting"]] for op in ops}
    made = tuple(make_target(op, 0.9 / len(ops), floor=0.4) for op in ops)
    by_source = {op: {_recorded(op, row): row for row in rows[op]} for op in ops}
    orders = {op: random.Random(f"{seed} {op}").sample(sorted(by_source[op]), len(rows[op])) for op in ops}

    def speed(target: str, source: str) -> float | None:
        row = by_source[target].get(source)
        return row["incumbent_us"] / row["candidate_us"] if row and row["accepted"] else None

    def propose(target: str, parents: Sequence[str], _asked: str, count: int) -> str:
        order = orders[target]
        if parents:
            order = sorted(order, key=lambda one: (_distance(parents[0], one), orders[target].index(one)))[1:]
        return order[count % len(order)]

    noises = [row["noise"] for op in ops for row in rows[op] if row["noise"]]
    costs = {op: statistics.mean(row["judge_s"] for row in rows[op]) for op in ops}
    return World(name, made, speed, propose, statistics.median(noises), costs)


def _recorded(op: str, row: Mapping[str, str]) -> str:
    return f"OP = {op!r}\nBACKEND = {row['backend']!r}\nSETTING = {row['setting']!r}\n"


def _distance(one: str, other: str) -> int:
    if one.splitlines()[1] != other.splitlines()[1]:
        return 100
    return len(set(one.splitlines()[2].split()) ^ set(other.splitlines()[2].split()))


# The two searches


@dataclass
class Night:
    """One simulated night: the world, its clock and what was found; `asked` numbers the answers of the recording."""

    world: World
    seed: int
    experiments: list[Experiment] = field(default_factory=list)
    attempts: dict[str, list[Attempt]] = field(default_factory=dict)
    standing: dict[str, float] = field(default_factory=dict)
    asked: dict[tuple[str, ...], int] = field(default_factory=dict)

    def ask(self, target: str, parents: Sequence[str], move: str) -> str:
        """The recording's next answer to this question."""
        key = (target, move, *parents)
        self.asked[key] = self.asked.get(key, -1) + 1
        return self.world.propose(target, parents, move, self.asked[key])

    def judge(self, target: str, source: str, parents: tuple[int, ...] = (), tactic: str = "") -> None:
        """One experiment: a noisy ratio against what stands, kept when its lower bound says so."""
        number = len(self.experiments) + 1
        candidate = Candidate(target, "triton", source, "", "", tactic=tactic, parents=parents)
        true, noise = self.world.speed(target, source), self.world.noise
        before = self.standing.get(target, 1.0)
        status, judged, gain = RowStatus.INCORRECT, None, None
        if duplicate_of(candidate, self.experiments):
            status = RowStatus.DUPLICATE
        elif true is not None:
            draw = random.Random(f"{self.seed} {target} {number} {source}")
            measured = true / before * math.exp(draw.gauss(0, noise))
            low = measured * math.exp(-2 * noise)
            kept = low - 1 > max(MIN_GAIN, 2 * noise)
            status = RowStatus.KEEP if kept else RowStatus.DISCARD
            judged = make_verdict(Status.KEEP if kept else Status.DISCARD, measured)
            assert judged.timing is not None
            eager = 10.0 * true * math.exp(draw.gauss(0, noise))
            judged = replace(judged, timing=replace(judged.timing, eager_us=eager, candidate_us=10.0))
            if kept:
                gain = self.model_ms() / self.model_ms({target: true})
                self.standing[target] = true
        done = ExperimentState.RECORDED
        self.experiments.append(
            Experiment(number, target, done, candidate, status, judged, None, "", None, model_gain=gain)
        )
        self.attempts.setdefault(target, []).append(
            Attempt(number, "", source, "triton", tactic, "", status, judged, parents)
        )

    def model_ms(self, change: Mapping[str, float] | None = None) -> float:
        """The true time of the model with what is kept (1 without), and with a change."""
        now = {**self.standing, **(change or {})}
        return 1.0 - sum(one.share * (1 - 1 / now.get(one.id, 1.0)) for one in self.world.targets)


def greedy(night: Night) -> bool:
    """Keep or revert: the target with the highest expected gain, an edit of what stands."""
    world = night.world
    standings = [standing(one, night.experiments, world.cost_s[one.id]) for one in world.targets]
    open_ones = [one for one in standings if is_open(one, frozenset())]
    if not open_ones:
        return False
    target = max(open_ones, key=lambda one: one.score).target.id
    kept = [one for one in night.experiments if one.target == target and one.status is RowStatus.KEEP]
    parents = [kept[-1].candidate.source] if kept and kept[-1].candidate else []
    night.judge(target, night.ask(target, parents, "edit" if parents else "start"))
    return True


@dataclass(frozen=True)
class Parts:
    """Which parts of the search are on."""

    sampled: bool = True  # Thompson sampling over targets, else the highest expected gain
    lines: bool = True  # lines, merges and the ladder, else edits of what stands
    sweeps: bool = True


def search(night: Night, parts: Parts = Parts()) -> bool:
    """This search, as agent/proposing.py drives it."""
    target = _sampled_target(night) if parts.sampled else _greedy_target(night)
    if target is None:
        return False
    attempts = night.attempts.get(target, [])
    now = plan(attempts)
    best = archive(attempts)[:1]
    if parts.sweeps and best and now.stalled >= SWEEP_AT and read_setting(best[0].source):
        setting = sweep_of(best[0], attempts, [])
        if setting:
            night.judge(target, apply_setting(best[0].source, setting), (best[0].number,), f"sweep {setting.text}")
            return True
    if not parts.lines:
        kept = [one for one in attempts if one.status is RowStatus.KEEP]
        parents = kept[-1:]
        move = "edit" if kept else "start"
    else:
        parents = [one for one in (now.base, now.partner) if one]
        move = "start" if now.move is Move.START else "edit"
    source = night.ask(target, [one.source for one in parents], move)
    night.judge(target, source, tuple(one.number for one in parents))
    return True


def _sampled_target(night: Night) -> str | None:
    world, tried = night.world, night.attempts
    last_keep = max((one.number for one in night.experiments if one.status is RowStatus.KEEP), default=0)
    rested = {one for one, mine in tried.items() if stall(mine) >= REST and mine[-1].number > last_keep}
    chosen = next_target(world.targets, night.experiments, rested, world.cost_s)
    chosen = chosen or next_target(world.targets, night.experiments, frozenset(), world.cost_s)
    return chosen.id if chosen else None


def _greedy_target(night: Night) -> str | None:
    standings = [standing(one, night.experiments, night.world.cost_s[one.id]) for one in night.world.targets]
    open_ones = [one for one in standings if is_open(one, frozenset())]
    return max(open_ones, key=lambda one: one.score).target.id if open_ones else None


WORKLOADS: Mapping[str, Mapping[str, float]] = {
    # noise: half a thousandth as between processes on the H200, a hundredth as on two quiet CPU cores (anchors)
    "simulated: few targets, rugged, GPU noise": {
        "targets": 4, "rugged": 1.0, "weight": 0.03, "wrong": 0.35, "noise": 0.0005,
    },
    "simulated: many targets, most answers wrong": {
        "targets": 12, "rugged": 0.6, "weight": 0.03, "wrong": 0.6, "noise": 0.0005,
    },
    "simulated: tunables decide, CPU noise": {
        "targets": 5, "rugged": 0.4, "weight": 0.08, "wrong": 0.35, "noise": 0.01,
    },
}  # fmt: skip


def workloads(seed: int) -> list[World]:
    """All workloads of one seed."""
    found = [
        simulated(
            name, seed, targets=int(one["targets"]), rugged=one["rugged"], weight=one["weight"], wrong=one["wrong"],
            noise=one["noise"],
        )
        for name, one in WORKLOADS.items()
    ]  # fmt: skip
    path = ROOT / "benchmarks" / "search_real.json"
    if path.exists():
        table = json.loads(path.read_text())
        ops = list(table)
        found += [real(f"real: {' and '.join(pair)}, H200", table, pair, seed) for pair in (ops[:2], ops[2:]) if pair]
    return found


def speedup(world: World, step: Callable[[Night], bool], experiments: int, seed: int) -> float:
    """The model's true speedup after the budget."""
    night = Night(world, seed)
    while len(night.experiments) < experiments and step(night):
        pass
    return 1.0 / night.model_ms()


def ablation(seeds: range, experiments: int) -> None:
    """The table: geometric means over seeds, and in how many of them the search was ahead."""
    policies: dict[str, Callable[[Night], bool]] = {
        "greedy": greedy,
        "search": search,
        "without sampling": lambda night: search(night, Parts(sampled=False)),
        "without lines": lambda night: search(night, Parts(lines=False)),
        "without sweeps": lambda night: search(night, Parts(sweeps=False)),
    }
    names = [world.name for world in workloads(0)]
    found: dict[str, dict[str, list[float]]] = {name: {policy: [] for policy in policies} for name in names}
    for seed in seeds:
        for world in workloads(seed):
            budget = experiments if world.name.startswith("simulated") else experiments // 5
            for policy, step in policies.items():
                found[world.name][policy].append(speedup(world, step, budget, seed))
    print(f"| workload | {' | '.join(policies)} | search ahead of greedy |\n|{'---|' * (len(policies) + 2)}")
    for name, row in found.items():
        means = [math.exp(statistics.mean(map(math.log, values))) for values in row.values()]
        ahead = sum(one > other * 1.0001 for one, other in zip(row["search"], row["greedy"], strict=True))
        behind = sum(other > one * 1.0001 for one, other in zip(row["search"], row["greedy"], strict=True))
        print(
            f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} | {ahead} of {len(seeds)}, behind in {behind} |"
        )


# Sweeps


def sweeps(seeds: int) -> None:
    """The true speedup over the first setting after so many tries, geometric mean, by what chooses the next one."""
    methods = {"one change at a time": _one_change, "Optuna TPE": _tpe, "additive model (ours)": _ours}
    print(f"| tries | {' | '.join(methods)} |\n|{'---|' * (len(methods) + 1)}")
    for tries in (4, 8, 12, 16):
        gains = {name: [_sweep(method, seed, tries) for seed in range(seeds)] for name, method in methods.items()}
        print(f"| {tries} | {' | '.join(f'{math.exp(statistics.mean(one)):.3f}' for one in gains.values())} |")


def _sweep(method: Callable[..., object], seed: int, tries: int) -> float:
    land = landscape(seed, rugged=0.0, weight=0.0, wrong=0.0)
    draw, names = random.Random(seed), list(TUNABLES)
    weights = [draw.uniform(0.02, 0.12) for _ in names]
    pair = draw.uniform(-0.08, 0.08)

    def saved(chosen: Sequence[int]) -> float:
        apart = [abs(one - other) for one, other in zip(chosen, land.best[0], strict=True)]
        linear = -sum(weight * one for weight, one in zip(weights, apart, strict=True))
        return linear + pair * math.sin(3 * chosen[0] + 5 * chosen[1])

    first = read_setting(write(0, frozenset(), [draw.randrange(len(one)) for one in TUNABLES.values()]))
    assert first is not None

    def index(setting: object) -> list[int]:
        return [TUNABLES[name].index(setting.current[name]) for name in names]  # type: ignore[attr-defined]

    noisy = random.Random(seed + 1)
    trials = [Trial(first, math.exp(saved(index(first)) + noisy.gauss(0, 0.01)))]
    while len(trials) <= tries:
        found = method(trials, seed)
        if found is None:
            break
        trials.append(Trial(found, math.exp(saved(index(found)) + noisy.gauss(0, 0.01))))  # type: ignore[arg-type]
    best = max(trials, key=lambda one: one.speed or 0.0)
    return saved(index(best.setting)) - saved(index(first))


def _ours(trials: Sequence[Trial], _seed: int) -> object:
    return next_setting(trials)


def _one_change(trials: Sequence[Trial], _seed: int) -> object:
    best = max(trials, key=lambda one: one.speed or 0.0).setting
    tried = {one.setting.text for one in trials}
    for name in best.names:
        for choice in best.choices[name]:
            changed = best.with_choice(name, choice)
            if changed.text not in tried:
                return changed
    return None


def _tpe(trials: Sequence[Trial], seed: int) -> object:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    names = trials[0].setting.names
    grid = {name: optuna.distributions.CategoricalDistribution(trials[0].setting.choices[name]) for name in names}
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed + len(trials), n_startup_trials=3))
    for one in trials:
        chosen = {name: one.setting.current[name] for name in names}
        study.add_trial(
            optuna.trial.create_trial(params=chosen, distributions=grid, value=-math.log(one.speed or 1e-9))
        )
    tried = {one.setting.text for one in trials}
    for _ in range(20):
        setting = trials[0].setting
        for name, choice in study.ask(grid).params.items():
            setting = setting.with_choice(name, choice)
        if setting.text not in tried:
            return setting
    return None


def main() -> int:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--experiments", type=int, default=120)
    parser.add_argument("--sweeps", action="store_true")
    options = parser.parse_args()
    if options.sweeps:
        sweeps(options.seeds)
    else:
        ablation(range(options.first_seed, options.first_seed + options.seeds), options.experiments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
