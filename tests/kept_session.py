"""A session of a real, small model with one kept kernel: really profiled, its journal written as the loop writes it."""

import hashlib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from tests_support import verdict
from workspaces import git, make_workspace

from agent import opening
from agent.journal import Decision, Journal
from agent.places import SessionPlaces, write_whole
from agent.proposers.playbook import Playbook
from agent.records import Brief, Candidate, RowStatus
from agent.session import Options
from agent.verbs import Harness
from harness import wire
from harness.records import ModelSpec, Status

MODEL = '''import torch


class Net(torch.nn.Module):
    """Two written-out RMSNorms around a linear layer."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.one = torch.nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.two = torch.nn.Parameter(torch.linspace(1.5, 0.5, width))
        self.linear = torch.nn.Linear(width, width)

    def norm(self, x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight

    def forward(self, x):
        return self.norm(self.linear(self.norm(x, self.one)), self.two)
'''


def kept_session(folder: Path, name: str = "night") -> SessionPlaces:
    """Make it: profile, propose by the playbook, keep."""
    workspace = make_workspace(folder)
    (workspace / "net.py").write_text(MODEL)
    git(workspace, "add", "net.py")
    git(workspace, "commit", "-q", "-m", "Net")
    places = SessionPlaces(workspace, name)
    model = ModelSpec(f"{workspace / 'net.py'}:Net", input_shapes=((4, 16, 64),), device="cpu")
    opening.create(workspace, name, Options(model, "cpu"))
    harness = Harness(workspace, places.log, lambda: False, lambda _name, _body: None)
    report = harness.profile(model, places.folder)
    write_whole(places.profile, wire.to_json(report))
    norms = [one for one in report.targets if "norm" in one.kind and len(one.call_sites) == 2 and not one.members]
    ideas = [Playbook().propose(Brief(one, "cpu", "cpu", report.peaks, None, None, (), "")) for one in norms]
    candidate = next(idea for idea in ideas if isinstance(idea, Candidate))
    keep(places, replace(candidate, prompt="ask with sk-abcdefghijklmnop0123456789", reply="the reply"))
    return places


def keep(places: SessionPlaces, candidate: Candidate) -> None:
    """One experiment that was kept, and one reply that was no kernel."""
    digest = hashlib.sha256(candidate.source.encode()).hexdigest()
    with closing(Journal(places.journal)) as journal:
        number = journal.propose(candidate.target, candidate)
        judged = replace(verdict(Status.KEEP, 1.4), target=candidate.target, kernel_sha256=digest)
        journal.judged(number, judged, judge_s=1.0)
        journal.decided(number, Decision(RowStatus.KEEP, "", "ab" * 20, 1.0, 1.1))
        journal.recorded(number)
