"""An OpenAI-compatible server that answers by a script: real HTTP, and every way in which one fails."""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

PIECE = 400  # characters in one streamed piece


@dataclass(frozen=True)
class Answer:
    """What the server does with one request."""

    text: str | None = ""
    finish: str | None = "stop"
    reasoning: str = ""
    usage: tuple[int, int] | None = (1000, 100)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: str | bytes | None = None  # instead of a completion
    content_type: str = "application/json"
    wait_s: float = 0.0  # before the first byte of the body
    drip_s: float = 0.0  # between pieces
    reset_after: int | None = None  # pieces, then the connection is reset
    done: bool = True


def refusal(status: int, message: str, code: str = "", **headers: str) -> Answer:
    """An error as OpenAI words it."""
    body = json.dumps({"error": {"message": message, "type": code, "code": code}})
    return Answer(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


Script = Sequence[Answer] | Callable[[dict[str, Any], int], Answer]


class LanguageModelServer:
    """Serves `script` (the last answer again and again) on a free port; `requests` holds what was asked."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.open_streams = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                """Silent."""

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = outer._next(body, dict(self.headers), self.path)
                with outer._lock:
                    outer.open_streams += 1
                try:
                    outer._send(self, answer, streamed=bool(body.get("stream")))
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with outer._lock:
                        outer.open_streams -= 1

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def prompt(self, index: int = -1) -> str:
        """The text of one request's messages."""
        return "\n".join(str(message["content"]) for message in self.requests[index]["messages"])

    def _next(self, body: dict[str, Any], headers: dict[str, str], path: str) -> Answer:
        with self._lock:
            index = len(self.requests)
            self.requests.append(body)
            self.headers.append(headers)
            self.paths.append(path)
        if callable(self.script):
            return self.script(body, index)
        return self.script[min(index, len(self.script) - 1)]

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer, *, streamed: bool) -> None:
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.send_header("Connection", "close")
        handler.close_connection = True
        if answer.body is not None or not streamed:
            self._send_whole(handler, answer)
        else:
            self._send_stream(handler, answer)

    def _send_whole(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        body = answer.body if answer.body is not None else json.dumps(_completion(answer))
        data = body.encode() if isinstance(body, str) else body
        handler.send_header("Content-Type", answer.content_type)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        time.sleep(answer.wait_s)
        handler.wfile.write(data)

    def _send_stream(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.flush()
        time.sleep(answer.wait_s)
        for index, piece in enumerate(_pieces(answer)):
            if answer.reset_after is not None and index >= answer.reset_after:
                linger = struct.pack("ii", 1, 0)  # closing sends RST
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                handler.rfile.close()  # it holds the socket open
                handler.connection.close()
                raise ConnectionResetError
            handler.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
            handler.wfile.flush()
            time.sleep(answer.drip_s if index else 0.0)  # the first piece holds no text
        if answer.done:
            handler.wfile.write(b"data: [DONE]\n\n")
            handler.wfile.flush()


def _pieces(answer: Answer) -> list[dict[str, Any]]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if answer.text is None else ""}]
    deltas += [{"reasoning_content": answer.reasoning[i : i + PIECE]} for i in range(0, len(answer.reasoning), PIECE)]
    text = answer.text or ""
    deltas += [{"content": text[i : i + PIECE]} for i in range(0, len(text), PIECE)]
    pieces = [_chunk([{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]
    if answer.finish:
        pieces.append(_chunk([{"index": 0, "delta": {}, "finish_reason": answer.finish}]))
    if answer.usage:
        pieces.append(_chunk([], _usage(answer.usage)))
    return pieces


def _chunk(choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
    chunk: dict[str, Any] = {
        "id": "x", "object": "chat.completion.chunk", "created": 1, "model": "scripted", "choices": choices,
    }  # fmt: skip
    return chunk | ({"usage": usage} if usage else {})


def _completion(answer: Answer) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning or None}
    whole = {
        "id": "x", "object": "chat.completion", "created": 1, "model": "scripted",
        "choices": [{"index": 0, "message": message, "finish_reason": answer.finish}],
    }  # fmt: skip
    return whole | ({"usage": _usage(answer.usage)} if answer.usage else {})


def _usage(usage: tuple[int, int]) -> dict[str, int]:
    return {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
