"""Seats on this host: one judge process for each device, pinned to it, under an exclusive lease while it works."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from agent.devices import ANYWHERE, Device
from agent.errors import OursError, OvernightError, StopRequestedError
from agent.executors.base import Answer, Job, Kind
from agent.harness_client import HarnessDiedError, HarnessProcess
from agent.journal import now_iso
from agent.lease import leased
from agent.verbs import VERIFY_TIMEOUT_S, Harness
from harness.records import JudgeRequest, Verdict, VerifyReport, VerifyRequest

PROBE_TIMEOUT_S = 90.0


class LocalSeat:
    """One device's judge: started with the first candidate, started once again when it dies."""

    kinds = frozenset({Kind.JUDGE, Kind.MEASURE})

    def __init__(self, harness: Harness, say: Callable[[str], None], device: Device = ANYWHERE) -> None:
        self._harness, self._say, self._device = harness, say, device
        self._judge: HarnessProcess | None = None

    @property
    def name(self) -> str:
        """The device."""
        return self._device.name

    def run(self, job: Job) -> Answer:
        """Judge, or measure in a process of its own; nothing else of ours works on the device meanwhile."""
        with leased(self._device.leases, self._harness.stop):
            if isinstance(job.request, VerifyRequest):
                return self._measure(job.request)
            assert isinstance(job.request, JudgeRequest)
            return self._judged(job, job.request)

    def _measure(self, request: VerifyRequest) -> VerifyReport:
        with self._harness.start("verify", self._device) as process:
            return process.call(
                "verify", request, VerifyReport, timeout_s=VERIFY_TIMEOUT_S, on_event=self._harness.on_event
            )

    def _judged(self, job: Job, request: JudgeRequest) -> Verdict:
        try:
            return self._call(job, request)
        except HarnessDiedError as error:
            self._say(f"the judge {self._on()}is started again: {str(error).splitlines()[0]}")
            self.close()
        try:
            return self._call(job, request)
        except OvernightError:
            self.close()
            raise

    def _call(self, job: Job, request: JudgeRequest) -> Verdict:
        self._judge = self._judge or self._harness.start("judge", self._device)
        with job.log.open("a", buffering=1, encoding="utf-8") as file:

            def write(name: str, body: Mapping[str, Any]) -> None:
                file.write(f"{now_iso()} {name} {json.dumps(dict(body), ensure_ascii=False)}\n")
                self._harness.on_event(name, body)

            timeout_s = self._harness.judge_timeout_s
            verdict = self._judge.call("judge", request, Verdict, timeout_s=timeout_s, on_event=write)
        if verdict.kernel_sha256 != hashlib.sha256(request.source.encode()).hexdigest():
            raise OursError("The judge answered for another kernel than the one it was given.")
        return verdict

    def fault(self) -> str | None:
        """A fresh process on the device either says what it is, or why it cannot."""
        try:
            with self._harness.start("device", self._device) as process:
                process.call("describe", {"device": self._device.kind, "peaks": False}, dict, timeout_s=PROBE_TIMEOUT_S)
        except OvernightError as error:
            return " ".join(str(error).split())
        except StopRequestedError:
            return None
        return None

    def close(self) -> None:
        """End the judge."""
        if self._judge:
            self._judge.close()
            self._judge = None

    def _on(self) -> str:
        return f"on {self.name} " if self.name else ""
