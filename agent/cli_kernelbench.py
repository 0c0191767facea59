"""`kernelbench`: sessions over a folder of KernelBench problems, and the benchmark's figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agent.cli_options import Device, Json, console, harness_in, print_json

if TYPE_CHECKING:
    from agent.kernelbench import Result
    from agent.session import Show


def kernelbench(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of KernelBench problem files.")],
    *,
    experiments: Annotated[int, typer.Option(min=1, help="Experiments for each problem.")] = 20,
    hours: Annotated[float | None, typer.Option(min=0.001, help="Active hours for each problem.")] = None,
    proposer: Annotated[str | None, typer.Option(help="playbook, llm, command or replay:DIR.")] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="batch_size=8", help="Sizes for the whole numbers at the top of the files.")
    ] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only problems with this in their path.")] = "",
    out: Annotated[Path | None, typer.Option(help="Where ModelNew files go; default below .overnight.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Run a session on each problem with library calls forbidden, write ModelNew files, report fast_p; resumable."""
    from agent import runner
    from agent.budget import Budget
    from agent.config import load_config
    from agent.errors import InputError
    from agent.kernelbench import problem_files, summary
    from agent.kernelbench_run import Course, Doer, run_all
    from agent.machine import default_device
    from agent.model_spec import checked_device, sizes
    from agent.repository import exclude_state, workspace_root
    from agent.session import Options
    from harness.records import ModelSpec

    root = workspace_root(Path.cwd())
    settings = load_config(root)
    runner.check_compiler()
    chosen = runner.absolute_proposer(settings.proposer if proposer is None else proposer)
    files = [path for path in problem_files(folder) if only in str(path.relative_to(folder))]
    if not files:
        raise InputError(f"--only {only}: no problem below {folder} has this in its path.")
    place = checked_device(device) or default_device()
    runner.make_proposer(Options(ModelSpec(str(files[0])), place, chosen))  # refused before anything is written
    course = Course(
        root, folder, place, Budget(hours=hours, experiments=experiments), chosen, sizes(shape) if shape else {}, out
    )
    exclude_state(root)
    rows: list[Result] = []
    for row in run_all(course, files, Doer(harness_in, _quiet())):
        rows.append(row)
        _say(row, as_json=as_json)
    data = {"device": place, "results": [_data(row) for row in rows], **summary(rows)}
    if as_json:
        print_json(data)
    else:
        _sum_up(data, course.answers)
    raise typer.Exit(0 if data["judged"] else 1)


def _data(row: "Result") -> dict[str, Any]:
    from harness import wire

    data: dict[str, Any] = wire.to_data(row)
    return data


def _say(row: "Result", *, as_json: bool) -> None:
    import sys

    figures = f"{row.speedup_vs_pytorch:.2f}x eager, {row.speedup_vs_best:.2f}x best" if row.speedup_vs_best else ""
    words = figures if row.fate == "solved" else row.detail
    print(f"{row.problem}: {row.fate} {words}"[:300], file=sys.stderr if as_json else sys.stdout, flush=True)


def _sum_up(data: dict[str, Any], answers: Path) -> None:
    show = console()
    show.print(f"{data['problems']} problems, {data['judged']} judged, {data['solved']} solved", highlight=False)
    for name, words in (("vs_eager", "eager"), ("vs_best_of_eager_and_compile", "the faster of eager and compile")):
        figures = data[name]
        if figures["median"] is not None:
            fast = ", ".join(f"fast_{bar} {share:.0%}" for bar, share in figures["fast_p"].items())
            means = f"geometric mean {figures['geometric_mean']:.2f}, median {figures['median']:.2f}"
            show.print(f"against {words}: {fast}; {means}", highlight=False)
    if data["solved"]:
        show.print(f"ModelNew files: {answers}", highlight=False, soft_wrap=True)


def _quiet() -> "Show":
    """A session's lines on standard error, so that `--json` stays alone on standard output."""
    import sys

    from agent.session import Show

    def say(line: str) -> None:
        print(f"  {line}"[:200], file=sys.stderr, flush=True)

    return Show(
        say=say, event=lambda _name, _body: None, ranking=lambda _report: None, verification=lambda _report: None
    )
