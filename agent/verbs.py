"""One-shot work of the harness for a command: profile a model, judge one kernel file, verify a model."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.devices import ANYWHERE, Device
from agent.errors import OursError
from agent.harness_client import HARNESS_ENTRY, HarnessProcess, StopCheck
from harness.records import (
    JudgeRequest,
    ModelSpec,
    ProfileReport,
    ProfileRequest,
    Verdict,
    VerifyReport,
    VerifyRequest,
    WrittenModel,
)
from harness.rpc import EventSink

# A wedged harness must not hang a night; these are far above what any of them needs.
JUDGE_TIMEOUT_S = 1800.0
PROFILE_TIMEOUT_S = 3600.0
VERIFY_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Harness:
    """Where harness processes log, which workspace they must not import from, and who may stop them."""

    workspace: Path
    log: Path
    stop: StopCheck
    on_event: EventSink
    entry: Path = HARNESS_ENTRY
    judge_timeout_s: float = JUDGE_TIMEOUT_S
    device: Device = ANYWHERE  # where it works unless told otherwise

    def start(self, role: str, device: Device | None = None) -> HarnessProcess:
        """A fresh process of that role, pinned to a device."""
        place = self.device if device is None else device
        return HarnessProcess(role, self.log, workspace=self.workspace, stop=self.stop, entry=self.entry, device=place)

    def profile(self, model: ModelSpec, folder: Path) -> ProfileReport:
        """Profile in a process of its own; targets are written below `folder`."""
        with self.start("profile") as process:
            request = ProfileRequest(model, str(folder))
            return process.call("profile", request, ProfileReport, timeout_s=PROFILE_TIMEOUT_S, on_event=self.on_event)

    def verify(self, request: VerifyRequest) -> VerifyReport:
        """Measure the whole model in a process of its own."""
        with self.start("verify") as process:
            return process.call("verify", request, VerifyReport, timeout_s=VERIFY_TIMEOUT_S, on_event=self.on_event)

    def model_new(self, request: VerifyRequest) -> WrittenModel:
        """A KernelBench problem's ModelNew with the request's kernels, written in a process of its own."""
        with self.start("verify") as process:
            return process.call("model_new", request, WrittenModel, timeout_s=VERIFY_TIMEOUT_S, on_event=self.on_event)

    def judge_once(self, request: JudgeRequest) -> Verdict:
        """Judge one file in a judge of its own."""
        with self.start("judge") as process:
            return process.call("judge", request, Verdict, timeout_s=JUDGE_TIMEOUT_S, on_event=self.on_event)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one command's log and targets; removed afterwards, unless a fault of ours has its trace there."""
    folder = Path(tempfile.mkdtemp(prefix="overnight-"))
    try:
        yield folder
    except OursError:
        raise  # the message names the log in this folder, so it stays
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
