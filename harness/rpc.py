"""JSON lines between the agent and a harness process: one request, any number of events, one reply.

Both ends are ours and trusted. The channel is a private pair of descriptors, so that whatever a model or a library
prints to standard output is only a log. Does not protect against a peer that lies.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

EventSink = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Message:
    """One line: `kind` is "request", "event", "reply" or "failure"; `name` is the verb or the event's name."""

    kind: str
    name: str
    body: Any


def send(stream: TextIO, message: Message) -> None:
    """Write one line and flush it; raises BrokenPipeError when the peer is gone."""
    stream.write(json.dumps({"kind": message.kind, "name": message.name, "body": message.body}, allow_nan=False) + "\n")
    stream.flush()


def receive(stream: TextIO) -> Iterator[Message]:
    """Yield messages until the peer closes its end."""
    for line in stream:
        data = json.loads(line)
        yield Message(data["kind"], data["name"], data["body"])
