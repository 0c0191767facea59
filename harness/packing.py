"""Weights rearranged once instead of at every call, for kernels that declare `prepack`.

Packed weights are kept per set of weights, by address, and made again in place when a weight was written to (its
version counter moved): CUDA graphs that were recorded with them stay right. Does not see a write through `.data`,
which leaves the version counter alone, nor any write when CUDA graphs of the user's own compile replay around us: call
`Optimized.refresh()` after one. Packed weights live as long as the process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Tensors = Sequence[torch.Tensor]


@dataclass
class Packed:
    """One set of weights and what became of it; holding the weights keeps their addresses from being used again."""

    weights: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    tensors: tuple[torch.Tensor, ...]


@dataclass
class Packer:
    """Gives a kernel its inputs with the weights at `places` packed."""

    prepack: Callable[..., object]
    places: tuple[int, ...]
    kept: dict[tuple[int, ...], Packed] = field(default_factory=dict)

    def __call__(self, inputs: Tensors) -> Tensors:
        """The kernel's inputs; packs on first sight of these weights and after a write to them."""
        weights = tuple(inputs[place] for place in self.places)
        key = tuple(weight.data_ptr() for weight in weights)
        packed = self.kept.get(key)
        if packed is None:
            versions = tuple(weight._version for weight in weights)  # noqa: SLF001 - torch's only sign of a write
            packed = Packed(tuple(weight.detach() for weight in weights), versions, self._pack(weights))
            if not _capturing(weights):  # memory of a graph's pool must not outlive the recording
                self.kept[key] = packed
        elif packed.versions != (now := tuple(weight._version for weight in weights)):  # noqa: SLF001 - as above
            self._again(packed, now)
        mixed = list(inputs)
        for place, tensor in zip(self.places, packed.tensors, strict=True):
            mixed[place] = tensor
        return mixed

    def refresh(self, *, force: bool = False) -> None:
        """Pack again, in place, whatever was written to since; everything with `force`."""
        for packed in self.kept.values():
            now = tuple(weight._version for weight in packed.weights)  # noqa: SLF001 - as above
            if force or now != packed.versions:
                self._again(packed, now)

    def _again(self, packed: Packed, versions: tuple[int, ...]) -> None:
        with torch.no_grad():
            for old, new in zip(packed.tensors, self._pack(packed.weights), strict=True):
                old.copy_(new)
        packed.versions = versions

    def _pack(self, weights: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            result = self.prepack(*(weight.detach() for weight in weights))
        leaves = tuple(result) if isinstance(result, tuple | list) else (result,)
        if len(leaves) != len(weights) or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise RuntimeError(f"prepack must return one tensor for each of its {len(weights)} weights")
        # A prepack may hand a weight through; a later write to it must not be taken for the packed copy's own.
        addresses = {weight.data_ptr() for weight in weights}
        return tuple(leaf.clone() if leaf.data_ptr() in addresses else leaf for leaf in leaves)


def _capturing(weights: Tensors) -> bool:
    return any(weight.is_cuda for weight in weights) and torch.cuda.is_current_stream_capturing()
