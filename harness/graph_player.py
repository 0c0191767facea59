"""Plays a compiled graph from CUDA graphs of our own: outputs are handed out without a copy, and stay valid.

A CUDA graph writes its outputs to the same memory at every replay. So a graph is recorded a few times, each with
memory of its own, and a recording is replayed only when nobody holds on to what it returned last; when all are taken,
one more is replayed whose outputs are copied out. Weights are read where they lie, other inputs are copied in.

What a recording cannot hold is run as it is: a graph that writes to its inputs, draws random numbers, reads tensors of
the CPU or returns its inputs. A weight that moved to other memory is noticed at the next call.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch

Run = Callable[..., Sequence[Any]]

WARM_CALLS = 1  # run as it is first: kernels are loaded, compiled and tuned by then
MAX_SIGNATURES = 8  # input shapes of one graph that are recorded; further ones run as they are
MAX_MOVES = 4  # how often weights may move before recording is given up
DIRECT_RECORDINGS = 2  # a loop that drops each output while the next call runs needs two
DIRECT_BYTES = 1 << 20  # outputs smaller than this are copied: that is cheaper than one more recording
FREE_SHARE = 8  # a further recording must fit this many times into the memory that is free


class Tape(Protocol):
    """Something recorded once that computes the same outputs from the same memory whenever it is replayed."""

    @property
    def outputs(self) -> Sequence[Any]:
        """What the function returned while it was recorded."""

    def replay(self) -> None:
        """Compute again, into the memory of `outputs`."""


Recorder = Callable[[Callable[[], Sequence[Any]]], Tape]


class CudaTape:
    """A CUDA graph in a memory pool of its own."""

    def __init__(self, function: Callable[[], Sequence[Any]]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self.outputs: Sequence[Any] = function()

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        self._graph.replay()


class Unplayable(Exception):  # noqa: N818 - a flow exception: why a graph runs as it is
    """A recording of this graph would not mean what the graph means."""


def holders(storage: int) -> int:
    """How many references there are to a storage (its address); raises AttributeError on a torch that cannot say."""
    return int(torch._C._storage_Use_Count(storage))  # noqa: SLF001 - as Inductor's own CUDA graphs ask


class Recording:
    """One tape, where its inputs are read, and whether anybody still holds its outputs."""

    def __init__(self, run: Run, flat: Sequence[Any], moving: Sequence[int], record: Recorder) -> None:
        # weights by their memory, which a recording reads: a parameter may be given other memory
        inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in flat]
        with torch.inference_mode(mode=False):
            for place in moving:
                inputs[place] = _room_for(flat[place])
        self.inputs = [inputs[place] for place in moving]
        self.read(flat[place] for place in moving)
        self._tape = record(lambda: run(*inputs))
        outputs = self._tape.outputs
        own = _storages(self.inputs)
        if any(isinstance(value, torch.Tensor) and _storage(value) in own for value in outputs):
            raise Unplayable("it returns one of its inputs")
        lasting = _storages(flat)
        self.fresh = [isinstance(value, torch.Tensor) and _storage(value) not in lasting for value in outputs]
        self._lasting = {value.untyped_storage().data_ptr() for value in flat if isinstance(value, torch.Tensor)}
        self._held = {_storage(value) for value, fresh in zip(outputs, self.fresh, strict=True) if fresh}
        self._alone = {storage: holders(storage) for storage in self._held}
        self.nbytes = sum(value.nbytes for value, fresh in zip(outputs, self.fresh, strict=True) if fresh)

    def read(self, values: Any) -> None:
        """Copy inputs to where the tape reads them."""
        for room, value in zip(self.inputs, values, strict=True):
            room.copy_(value)

    def free(self) -> bool:
        """Whether nobody but us holds the outputs of the last replay."""
        return all(holders(storage) == alone for storage, alone in self._alone.items())

    def play(self) -> list[Any]:
        """Replay, and hand out the outputs themselves."""
        self._tape.replay()
        outputs = self._tape.outputs
        return [value.detach() if fresh else value for value, fresh in zip(outputs, self.fresh, strict=True)]

    def play_copied(self) -> list[Any]:
        """Replay, and hand out copies; outputs that share memory still do."""
        self._tape.replay()
        return owned(self._tape.outputs, self._lasting)


def owned(leaves: Sequence[Any], lasting: set[int]) -> list[Any]:
    """The outputs of a CUDA graph in memory of their own, where its next replay cannot overwrite them.

    Left as they are: leaves that are no tensors, and those in `lasting` storages (data pointers), which outlive a
    replay by themselves. Views of one storage stay views of one storage; what carries a gradient is cloned alone.
    """
    places = [leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]
    copies: dict[int, torch.UntypedStorage] = {}
    result = []
    for leaf, place in zip(leaves, places, strict=True):
        if not place or place in lasting:
            result.append(leaf)
        elif leaf.requires_grad or (leaf.is_contiguous() and places.count(place) == 1):
            result.append(leaf.clone())
        else:
            if place not in copies:
                copies[place] = leaf.untyped_storage().clone()
            result.append(leaf.new_empty(0).set_(copies[place], leaf.storage_offset(), leaf.size(), leaf.stride()))
    return result


def _room_for(value: torch.Tensor) -> torch.Tensor:
    if any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)):
        raise Unplayable("an input repeats memory")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)  # noqa: SLF001 - the identity of a storage


def _storages(values: Sequence[Any]) -> set[int]:
    return {_storage(value) for value in values if isinstance(value, torch.Tensor)}


@dataclass
class Player:
    """The recordings of one graph for one set of input shapes."""

    run: Run
    moving: Sequence[int]
    record: Recorder
    direct: list[Recording] = field(default_factory=list)
    copying: Recording | None = None

    def prepare(self, flat: Sequence[Any]) -> None:
        """Record; raises Unplayable, or what the capture raises."""
        first = self.recording(flat)
        if first.nbytes < DIRECT_BYTES:
            self.copying = first
            return
        self.direct = [first]
        while len(self.direct) < DIRECT_RECORDINGS and self._fits(first):
            self.direct.append(self.recording(flat))

    def recording(self, flat: Sequence[Any]) -> Recording:
        """One more recording; raises Unplayable, or what the capture raises."""
        return Recording(self.run, flat, self.moving, self.record)

    def _fits(self, first: Recording) -> bool:
        return not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] > FREE_SHARE * first.nbytes

    def ready(self) -> bool:
        """Whether it can play without recording."""
        return self.copying is not None or any(recording.free() for recording in self.direct)

    def play(self, flat: Sequence[Any]) -> list[Any]:
        """Outputs that stay valid for as long as somebody holds them; only when `ready`."""
        free = next((recording for recording in self.direct if recording.free()), None)
        if free is not None:
            free.read(flat[place] for place in self.moving)
            return free.play()
        assert self.copying is not None
        self.copying.read(flat[place] for place in self.moving)
        return self.copying.play_copied()


@dataclass(frozen=True)
class Played:
    """What a call was played with: the flat inputs, None in the place of each weight."""

    player: Player
    flat: tuple[Any, ...]


@dataclass(frozen=True)
class Started:
    """A replay launched before it was known to be wanted, and the arguments it was launched for."""

    played: Played
    outputs: list[Any]


class GraphPlayer:
    """A compiled graph as Dynamo calls it: `run` with flat inputs, played from recordings where that means the same.

    `moving` are the places of inputs that are no weights of the model. Every call is noted in `called`.
    """

    def __init__(
        self, run: Run, moving: Sequence[int], called: "list[GraphPlayer]", record: Recorder = CudaTape
    ) -> None:
        self.run, self._called, self._record = run, called, record
        self._moving = tuple(moving)
        self._players: dict[tuple[Any, ...], Player | None] = {}
        self._warm: dict[tuple[Any, ...], int] = {}
        self._weights: list[Any] = []
        self._pointers: list[int] = []
        self._moves = 0
        self._lock = Lock()
        self._stream: Any = None
        self.started: Started | None = None
        self.last: Played | None = None  # the last call, if it was played; whoever reads it forgets it
        self.why_not = ""

    def __call__(self, *flat: Any) -> Sequence[Any]:
        """The graph's outputs, valid for as long as somebody holds them."""
        self._called.append(self)
        self.last = None
        started, self.started = self.started, None
        if started is not None and self._is_for(started.played, flat):
            self.last = started.played
            return started.outputs
        if self.why_not or not self._lock.acquire(blocking=False):
            return self.run(*flat)
        try:
            return self._played(flat)
        finally:
            self._lock.release()

    def start(self, played: Played) -> bool:
        """Launch for these inputs now; `__call__` hands the outputs out if it is then called with just these."""
        if self.why_not or capturing() or not self._lock.acquire(blocking=False):
            return False
        try:
            if not self._stands(played.player) or not played.player.ready():
                return False
            self._in_order()
            self.started = Started(played, played.player.play(played.flat))
        finally:
            self._lock.release()
        return True

    def _is_for(self, played: Played, flat: Sequence[Any]) -> bool:
        same = all(
            flat[place] is value if isinstance(value, torch.Tensor) else flat[place] == value
            for place, value in enumerate(played.flat)
            if value is not None
        )
        return same and self._stands(played.player) and self._weights_stay(flat)

    def _stands(self, player: Player) -> bool:
        """Whether these recordings are still in use: weights that moved drop them all."""
        return any(player is known for known in self._players.values())

    def _played(self, flat: Sequence[Any]) -> Sequence[Any]:
        key = self._signature(flat)
        if capturing() or not self._weights_stay(flat):
            return self.run(*flat)
        if key not in self._players:
            if self._warm.get(key, 0) < WARM_CALLS or len(self._players) >= MAX_SIGNATURES:
                self._warm = {key: self._warm.get(key, 0) + 1}
                return self.run(*flat)
            self._players[key] = self._recorded(flat)
        player = self._players[key]
        if player is None:
            return self.run(*flat)
        self._in_order()
        weights = set(range(len(flat))).difference(self._moving)
        self.last = Played(player, tuple(None if place in weights else value for place, value in enumerate(flat)))
        if not player.ready():
            try:
                player.copying = player.recording(flat)
            except (Unplayable, RuntimeError) as error:  # most likely no memory is left for one more
                self._give_up(error)
                self.last = None
                return self.run(*flat)
        return player.play(flat)

    def _recorded(self, flat: Sequence[Any]) -> Player | None:
        moving = [place for place in self._moving if _is_tensor(flat[place])]
        player = Player(self.run, moving, self._record)
        try:
            player.prepare(flat)
        except (Unplayable, RuntimeError, AttributeError) as error:
            self._give_up(error)
            return None
        if not self._pointers:
            self._weights = [value.detach() for value in self._weights_of(flat)]
            self._pointers = pointers(self._weights)
        return player

    def _give_up(self, error: Exception) -> None:
        """Run the graph as it is from now on."""
        self.why_not = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        if torch.cuda.is_available():
            with suppress(RuntimeError):  # an error that the failed capture left behind is told once
                torch.cuda.synchronize()

    def _weights_of(self, flat: Sequence[Any]) -> list[torch.Tensor]:
        moving = set(self._moving)
        return [value for place, value in enumerate(flat) if place not in moving and _is_tensor(value)]

    def _weights_stay(self, flat: Sequence[Any]) -> bool:
        """Whether weights lie where they were recorded; otherwise every recording is dropped, a few times."""
        if not self._pointers or pointers(self._weights_of(flat)) == self._pointers:
            return True
        self._players.clear()
        self._weights, self._pointers = [], []
        self._moves += 1
        if self._moves > MAX_MOVES:
            self.why_not = "its weights keep moving"
        return False

    def _signature(self, flat: Sequence[Any]) -> tuple[Any, ...]:
        key: list[Any] = [torch.is_inference_mode_enabled()]
        for place in self._moving:
            value = flat[place]
            if _is_tensor(value):
                key.append((value.shape, value.stride(), value.dtype, value.device))
            else:
                key.append(value)
        return tuple(key)

    def _in_order(self) -> None:
        """Replays share memory, so one on another stream waits for the last one."""
        if not torch.cuda.is_available():
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and stream != self._stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def pointers(values: Sequence[torch.Tensor]) -> list[int]:
    """Addresses of tensors; in one C loop, for a model has hundreds of weights."""
    return list(map(torch.Tensor.data_ptr, values))


def capturing() -> bool:
    """Whether the caller is recording a CUDA graph of its own on this stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
