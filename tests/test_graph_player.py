"""Graphs played from recordings: outputs stay valid, moved weights and changed guards are noticed."""

import pytest
import torch
from torch import nn

from harness.graph_backend import learnt, moving, plain_arguments, unplayable
from harness.graph_player import GraphPlayer


class Rerun:
    """A tape of the CPU: computes again into the memory of the first outputs, as a CUDA graph does."""

    made = 0

    def __init__(self, function):
        self.function, self.outputs = function, function()
        Rerun.made += 1

    def replay(self):
        for old, new in zip(self.outputs, self.function(), strict=True):
            if isinstance(old, torch.Tensor):
                old.copy_(new)


@pytest.fixture(autouse=True)
def count():
    Rerun.made = 0


def affine(x, weight):
    return [x @ weight, x.sum()]


def player(run=affine, places=(0,)):
    return GraphPlayer(run, places, [], Rerun)


WEIGHT = torch.randn(8, 60000)  # outputs of 4 rows are about 1 MB


def test_every_output_stays_valid_however_many_are_held():
    play = player()
    inputs = [torch.randn(8, 8) for _ in range(7)]
    held = [play(x, WEIGHT) for x in inputs]
    for x, (y, total) in zip(inputs, held, strict=True):
        assert torch.equal(y, x @ WEIGHT)
        assert torch.equal(total, x.sum())
    assert play.why_not == ""
    assert Rerun.made == 3  # two whose outputs are handed out, one whose outputs are copied


def test_a_loop_that_drops_its_outputs_needs_no_copy_and_two_places():
    play, places = player(), set()
    for _ in range(8):
        y, _ = play(torch.randn(8, 8), WEIGHT)
        places.add(y.data_ptr())
    assert Rerun.made == 2
    assert len(places) <= 3  # the first call ran as it is


def test_a_view_of_an_output_keeps_it_valid():
    play = player()
    for _ in range(2):
        play(torch.randn(8, 8), WEIGHT)
    x = torch.randn(8, 8)
    row = play(x, WEIGHT)[0][3]
    for _ in range(4):
        play(torch.randn(8, 8), WEIGHT)
    assert torch.equal(row, (x @ WEIGHT)[3])


def test_small_outputs_are_copied_and_share_memory_as_before():
    def run(x):
        y = x * 2
        return [y, y[1:], None, 3]

    play = player(run)
    held = [play(torch.full((4,), float(step))) for step in range(5)]
    for step, (y, part, nothing, number) in enumerate(held):
        assert torch.equal(y, torch.full((4,), 2.0 * step))
        assert torch.equal(part, y[1:])
        assert (nothing, number) == (None, 3)
    assert held[3][0].untyped_storage().data_ptr() == held[3][1].untyped_storage().data_ptr()
    assert Rerun.made == 1


def test_a_weight_that_moved_is_read_where_it_lies_now():
    play, x = player(), torch.randn(8, 8)
    weight = WEIGHT.clone()
    for _ in range(3):
        play(x, weight)
    weight.mul_(3)
    assert torch.equal(play(x, weight)[0], x @ weight)
    other = torch.randn_like(WEIGHT)
    for _ in range(3):
        assert torch.equal(play(x, other)[0], x @ other)
    assert play.why_not == ""


def test_weights_that_keep_moving_end_the_recording():
    play, x = player(), torch.randn(8, 8)
    for _ in range(20):
        weight = torch.randn(8, 100)
        for _ in range(3):
            assert torch.equal(play(x, weight)[0], x @ weight)
    assert play.why_not == "its weights keep moving"


def test_many_shapes_are_right_and_few_are_recorded():
    play, weight = player(), torch.randn(8, 4)
    for rows in [*range(1, 30), *range(1, 30)]:
        for _ in range(3):
            x = torch.randn(rows, 8)
            assert torch.equal(play(x, weight)[0], x @ weight)
    assert Rerun.made == 8


def test_a_graph_that_returns_its_input_runs_as_it_is():
    play = player(lambda x: [x, x + 1])
    x = torch.randn(3)
    for _ in range(4):
        same, more = play(x)
        assert same is x
        assert torch.equal(more, x + 1)
    assert play.why_not == "it returns one of its inputs"


def test_a_failing_recording_runs_as_it_is():
    class Failing(Rerun):
        def __init__(self, function):
            raise RuntimeError("operation not permitted when stream is capturing")

    play = GraphPlayer(affine, (0,), [], Failing)
    x = torch.randn(2, 8)
    for _ in range(3):
        assert torch.equal(play(x, WEIGHT)[0], x @ WEIGHT)
    assert "not permitted" in play.why_not


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.double = nn.Linear(8, 60000), False

    def forward(self, x, factor=1.0):
        return {"y": self.line(x) * (2 if self.double else 1) * factor}


class Deployed:
    """A model behind real Dynamo guards, its graphs played from tapes of the CPU."""

    def __init__(self, model):
        self.called, self.players, self.start, self.launches = [], [], None, 0
        torch._dynamo.reset()
        self.compiled = torch.compile(model, backend=self.backend)

    def backend(self, graph, examples):
        del examples
        self.players.append(GraphPlayer(graph.forward, moving(graph), self.called, Rerun))
        return self.players[-1]

    def __call__(self, *args, **kwargs):
        leaves = plain_arguments(args, kwargs)
        launched = self.start is not None and self.start.fits(leaves) and self.start.launch(leaves)
        self.launches += launched
        self.called.clear()
        result = self.compiled(*args, **kwargs)
        if launched and not self.start.settle():
            self.start = None
        if not launched:
            self.start = learnt(self.called, leaves)
        for each in self.called:
            each.last = None
        return result


def test_a_call_launched_ahead_is_handed_out_when_the_guards_agree_and_dropped_when_they_do_not():
    model = Model().eval()
    deployed = Deployed(model)
    with torch.no_grad():
        for step in range(24):
            model.double = step % 8 == 7
            x = torch.randn(5, 8)
            wanted = model(x)["y"]
            assert torch.allclose(deployed(x)["y"], wanted, atol=1e-5), step
        assert deployed.launches > 10
        for _ in range(5):
            model.line.weight = nn.Parameter(torch.randn(60000, 8))
            x = torch.randn(5, 8)
            for factor in (1.0, 3.0):
                assert torch.allclose(deployed(x, factor=factor)["y"], model(x, factor=factor)["y"], atol=1e-4)


def test_an_argument_that_is_more_than_a_tensor_is_not_launched_ahead():
    assert plain_arguments((torch.zeros(1), 3), {"name": None}) is not None
    assert plain_arguments(([torch.zeros(1)],), {}) is None
    assert plain_arguments((), {"mask": {"a": torch.zeros(1)}}) is None


class Writes(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.drop = what, nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x):
        y = x * 2
        if self.what == "buffer":
            self.steps += 1
        if self.what == "view of the input":
            x[1:].add_(1)
        if self.what == "value of its own":
            y.add_(1)
        if self.what == "random":
            y = self.drop(y)
        return y + self.steps


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("buffer", "it writes to a tensor that it is given"),
        ("view of the input", "it writes to a tensor that it is given"),
        ("random", "it draws random numbers"),
        ("value of its own", "it reads a tensor of the CPU"),  # what a machine without a GPU says of the rest
    ],
)
def test_a_graph_that_a_recording_would_change_the_meaning_of_is_not_recorded(what, reason):
    found = []

    def backend(graph, examples):
        del examples
        found.append(unplayable(graph))
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Writes(what), backend=backend)(torch.ones(4))
    assert found == [reason]
    torch.compile(Writes(what), backend=backend)(torch.ones(4))
    assert found[-1] == "gradients are on"


def test_outputs_that_are_all_held_stay_valid_when_calls_are_launched_ahead():
    model = Model().eval()
    deployed = Deployed(model)
    with torch.no_grad():
        inputs = [torch.randn(5, 8) for _ in range(9)]
        held = [deployed(x)["y"] for x in inputs]
        for x, y in zip(inputs, held, strict=True):
            assert torch.allclose(y, model(x)["y"], atol=1e-5)
    assert deployed.launches > 3
    assert deployed.players[0].why_not == ""


def test_a_recording_for_copies_that_fails_runs_the_graph_as_it_is():
    class Third(Rerun):
        def __init__(self, function):
            if Rerun.made == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(function)

    play = GraphPlayer(affine, (0,), [], Third)
    inputs = [torch.randn(8, 8) for _ in range(7)]
    held = [play(x, WEIGHT)[0] for x in inputs]
    for x, y in zip(inputs, held, strict=True):
        assert torch.equal(y, x @ WEIGHT)


def test_a_weight_that_moved_is_noticed_however_often_the_same_call_is_launched_ahead():
    model = Model().eval()
    deployed = Deployed(model)
    with torch.no_grad():
        for _ in range(3):
            for _ in range(5):
                x = torch.randn(5, 8)
                assert torch.allclose(deployed(x)["y"], model(x)["y"], atol=1e-4)
            model.line.weight.data = torch.randn(60000, 8)
    assert deployed.launches > 3
