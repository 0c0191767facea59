"""Asks the reference of one problem: draws a case's inputs and knows what must come back.

References, seeds and expectations live in this process only. Does not protect against a wrong reference.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.compare import Expected, expectations
from harness.errors import OursError
from harness.inputs import draw_case, secret_generator
from harness.problem import Case, Problem
from harness.records import Scalar
from harness.truth import Leaves, NoTensor, compile_reference, in_float64, original, with_rounding_noise

NOISE_DRAWS, FEW_NOISE_DRAWS = 8, 3
FEW_ELEMENTS = 1 << 18
"""Below this size a block may hold few independent errors, so the noise is drawn more often."""
UNIT_ROUNDOFF = {"float64": 2.0**-53}
FLOAT32_ROUNDOFF = 2.0**-24
"""Half types accumulate in float32 too, in every library there is."""


class ReferenceRefusal(OursError):  # noqa: N818 - names read as what happened
    """The original op itself raises on these inputs, so nobody can say what a candidate should answer."""


@dataclass(frozen=True)
class Question:
    """One case with values, and what the candidate must answer."""

    case: Case
    inputs: tuple[torch.Tensor, ...]
    expected: tuple[Expected, ...]


class Oracle:
    """The trusted side of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._reference = compile_reference(problem.reference)
        self._generator = secret_generator(problem.device)
        self._samples = _load_samples(problem)

    def draw(self, case: Case) -> tuple[torch.Tensor, ...]:
        """Fresh inputs."""
        return draw_case(case, self._generator, self._samples, self.problem.own)

    def ask(self, case: Case) -> Question:
        """Fresh inputs and their expectation."""
        inputs = self.draw(case)
        return Question(case, inputs, self.expect(case, inputs))

    def original(self, inputs: Sequence[torch.Tensor], constants: Mapping[str, Scalar]) -> tuple[torch.Tensor, ...]:
        """The original op on copies, so that nothing of ours is changed by a reference that mutates."""
        with effective_precision(self.problem.precision):
            return original(self._reference, inputs, constants)

    def expect(self, case: Case, inputs: Sequence[torch.Tensor], *, draws: int = 0) -> tuple[Expected, ...]:
        """Truth, original and rounding noise for given inputs; `draws` of noise, by size where it is 0.

        Raises ReferenceRefusal where the original itself fails on them and OursError where its float64 truth does;
        running out of memory and a broken device are neither, and pass through.
        """
        own = self._own_answer(case, inputs)
        small = max(value.numel() for value in inputs) <= FEW_ELEMENTS
        unit = UNIT_ROUNDOFF.get(case.dtype, FLOAT32_ROUNDOFF)
        try:
            truth = in_float64(self._reference, inputs, case.constants)
            noisy = [
                with_rounding_noise(
                    self._reference, inputs, case.constants, unit_roundoff=unit, generator=self._generator
                )
                for _ in range(draws or (NOISE_DRAWS if small else FEW_NOISE_DRAWS))
            ]
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise OursError(f"the reference of {self.problem.target} fails on {case.name}: {error}") from error
        return expectations(truth, own, noisy)

    def _own_answer(self, case: Case, inputs: Sequence[torch.Tensor]) -> Leaves:
        try:
            return self.original(inputs, case.constants)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, NoTensor) as error:
            raise ReferenceRefusal(f"the reference of {self.problem.target} fails on {case.name}: {error}") from error


@contextlib.contextmanager
def effective_precision(precision: str) -> Iterator[None]:
    """The global flags under which the model ran when it was captured; plain IEEE where it said nothing."""
    wanted = "tf32" in precision
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = wanted, wanted
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _load_samples(problem: Problem) -> tuple[tuple[torch.Tensor, ...], ...]:
    if problem.samples is None:
        return ()
    path = Path(problem.samples)
    loaded = torch.load(path, map_location=problem.device, weights_only=True)
    return tuple(tuple(call) for call in loaded)
