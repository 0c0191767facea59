"""Serves the agent's requests in a harness process: one role, one channel, every failure said with its kind."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from harness import rpc, wire
from harness.errors import OvernightError
from harness.records import Failure, JudgeRequest, ModelSpec, ProfileRequest, VerifyRequest

Handler = Callable[[Any, rpc.EventSink], object]
PR_SET_PDEATHSIG = 1


def handlers(role: str) -> Mapping[str, Handler]:
    """The verbs of a role. Imports are per role, so that a judge never loads the profiler."""
    if role == "judge":
        from harness.judge import Judge

        judge = Judge()
        return {
            "judge": lambda body, emit: judge.judge(wire.from_data(JudgeRequest, body), emit),
            "sandbox": lambda _body, _emit: {"layers": judge.sandbox_layers()},
        }
    if role == "profile":
        from harness.profiling import profile

        return {"profile": lambda body, emit: profile(wire.from_data(ProfileRequest, body), emit)}
    if role == "verify":
        from harness.delivery_facts import delivery_facts
        from harness.model_new import model_new
        from harness.verify import verify

        return {
            "verify": lambda body, emit: verify(wire.from_data(VerifyRequest, body), emit),
            "facts": lambda body, _emit: delivery_facts(wire.from_data(ModelSpec, body)),
            "model_new": lambda body, _emit: model_new(wire.from_data(VerifyRequest, body)),
        }
    if role == "device":
        from harness.device import describe

        return {"describe": lambda body, _emit: describe(body)}
    raise ValueError(f"unknown role {role!r}")


def serve(role: str, request_fd: int, reply_fd: int) -> int:
    """Answer until the agent closes its end; the process dies with its parent."""
    with suppress(OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C belongs to the agent, which stops us in order
    with os.fdopen(request_fd, encoding="utf-8") as requests, os.fdopen(reply_fd, "w", encoding="utf-8") as replies:

        def emit(name: str, body: Mapping[str, Any]) -> None:
            rpc.send(replies, rpc.Message("event", name, dict(body)))

        verbs: Mapping[str, Handler] | None = None
        for message in rpc.receive(requests):
            try:
                verbs = verbs or handlers(role)
                result = verbs[message.name](message.body, emit)
                body = result if isinstance(result, dict) else wire.to_data(result)
                rpc.send(replies, rpc.Message("reply", message.name, body))
            except Exception as error:  # noqa: BLE001 - the process's top frame: said, not hidden
                rpc.send(replies, rpc.Message("failure", message.name, wire.to_data(_failure(error))))
    return 0


def _failure(error: Exception) -> Failure:
    kind = error.kind if isinstance(error, OvernightError) else "ours"
    message = str(error) if isinstance(error, OvernightError) else f"{type(error).__name__}: {error}"
    return Failure(kind, message, traceback.format_exc())
