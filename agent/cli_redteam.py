"""`redteam`: judge the corpora of cheats and of honest oddities, and count the judge's errors."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agent.cli_options import Device, Json, harness_in, print_json

if TYPE_CHECKING:
    from agent.redteam import Trial


def redteam(
    *,
    device: Device = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only files with this in their name.")] = "",
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Judge each file this often.")] = 1,
    bench: Annotated[bool, typer.Option("--bench/--no-bench", help="Time honest kernels too.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out files that wait out a time limit.")] = False,
    as_json: Json = False,
) -> None:
    """Judge kernels that cheat and odd ones that are honest; exit 0 when the judge is wrong about none."""
    from agent.cli_measure import refuse_without_device
    from agent.errors import InputError
    from agent.machine import default_device
    from agent.model_spec import checked_device
    from agent.redteam import Outcome, corpus, data, judged, specimens
    from agent.verbs import scratch_folder

    place = checked_device(device) or default_device()
    chosen = [one for one in specimens(corpus(), only) if one.runs_on(place) and not (quick and one.slow)]
    if not chosen:
        raise InputError(f"--only {only}: none of these files runs on {place} here.")
    trials: list[Trial] = []
    with scratch_folder() as folder:
        for trial in judged(harness_in(folder), chosen * repeat, place, bench=bench):
            if trial.verdict is not None:
                refuse_without_device(trial.verdict)
            trials.append(trial)
            if not as_json:
                _show(trial)
    report = data(trials, place)
    if as_json:
        print_json(report)
    else:
        _sum_up(report)
    if report["cheats_accepted"] or report["honest_refused"]:
        raise typer.Exit(1)
    if any(trial.outcome is Outcome.UNDECIDED for trial in trials):
        raise typer.Exit(3)


def _show(trial: "Trial") -> None:
    from agent.redteam import Kind, Outcome

    words = {
        Outcome.RIGHT: "refused" if trial.specimen.kind is Kind.CHEAT else "accepted",
        Outcome.OTHER_REASON: "refused for another reason",
        Outcome.WRONG: "ACCEPTED" if trial.specimen.kind is Kind.CHEAT else "REFUSED",
        Outcome.UNDECIDED: "undecided",
    }
    why = "" if trial.outcome is Outcome.RIGHT else f": {trial.detail}"
    print(f"{trial.specimen.kind}/{trial.specimen.name}: {words[trial.outcome]}{why}", flush=True)


def _sum_up(report: dict[str, object]) -> None:
    print(f"cheats accepted: {report['cheats_accepted']} of {report['cheats']}")
    print(f"honest kernels refused: {report['honest_refused']} of {report['honest']}")
    if report["other_reason"]:
        print(f"cheats refused for another reason than expected: {report['other_reason']}")
    if report["undecided"]:
        print(f"undecided, for reasons of this machine or our own: {report['undecided']}", file=sys.stderr)
