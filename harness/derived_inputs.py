"""Inputs derived from a model's signature and configuration, for users who give none.

Knows the inputs that transformers models name (ids, images, waveforms, spectrograms, and pairs of an encoder's and a
decoder's); elsewhere the first layer says what it takes. Anything less certain is refused, never guessed.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.errors import InputError
from harness.example_inputs import InputSet, first_table, random_floats, random_ids, required_parameters

DEFAULT_LENGTH = 128
DEFAULT_IMAGE = 64  # pixels a side where the configuration names none: fully convolutional models take any
DEFAULT_SAMPLES = 4096
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_seq_len",
    "max_sequence_length",
    "context_length",
)


def derive_inputs(model: nn.Module, device: torch.device, dtype: torch.dtype) -> InputSet:
    """Inputs from the model's configuration or its first layer; raises InputError when that is a guess too far."""
    if getattr(model, "config", None) is not None:
        named = _Named(model, device, dtype).inputs()
        if named:
            return InputSet((), named)
    names = required_parameters(model)
    if len(names) == 1:
        table = first_table(model)
        if table is not None:
            return InputSet((random_ids((1, DEFAULT_LENGTH), table.num_embeddings, device),))
        shape = _first_layer_shape(model)
        if shape is not None:
            return InputSet((random_floats(shape, device, dtype),))
    raise InputError(
        f"cannot tell what {type(model).__name__}.forward({', '.join(names)}) takes; give --inputs FILE.py:FUNCTION or "
        "--input-shape, once per parameter"
    )


@dataclass(frozen=True)
class _Named:
    """The inputs of a model with a configuration, by the names its forward gives them."""

    model: nn.Module
    device: torch.device
    dtype: torch.dtype

    def inputs(self) -> dict[str, torch.Tensor]:
        """What forward needs, by name; empty when the configuration does not tell."""
        makers: dict[str, Callable[[], torch.Tensor | None]] = {
            "input_ids": self.ids,
            "pixel_values": self.image,
            "input_values": self.waveform,
            "input_features": self.spectrogram,
        }
        main = getattr(self.model, "main_input_name", None)
        if main not in makers:
            main = next((name for name in makers if name in self.accepted()), None)
        wanted = [name for name in (main, self.second_tower()) if name is not None]
        made = {name: value for name in wanted if (value := makers[name]()) is not None}
        if made and self.has_decoder():
            made["decoder_input_ids"] = self.ids_for_decoder()
        return made

    def accepted(self) -> set[str]:
        """The parameters of forward."""
        return set(inspect.signature(self.model.forward).parameters)

    def configs(self) -> Iterator[Any]:
        """The configuration, then those of its towers."""
        config: Any = self.model.config
        yield config
        for name in ("text_config", "vision_config", "audio_config", "decoder", "encoder"):
            part = getattr(config, name, None)
            if part is not None and not isinstance(part, (int, str, bool)):
                yield part

    def setting(self, *names: str) -> Any:
        """The first of some settings that any of the configurations has."""
        for config in self.configs():
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return None

    def second_tower(self) -> str | None:
        """Images beside text, where a model compares the two; where text merely may hold images, text alone will do."""
        config: Any = self.model.config
        towers = hasattr(config, "text_config") and hasattr(config, "vision_config")
        mixed = any(hasattr(config, name) for name in ("image_token_id", "image_token_index"))
        return "pixel_values" if towers and not mixed and "pixel_values" in self.accepted() else None

    def has_decoder(self) -> bool:
        """Whether forward takes a decoder's ids that it will not make itself."""
        return bool(getattr(self.model.config, "is_encoder_decoder", False)) and "decoder_input_ids" in self.accepted()

    def vocabulary(self) -> int | None:
        """How many ids there are: what the table really holds, which may be less than the configuration says."""
        getter = getattr(self.model, "get_input_embeddings", None)
        try:
            table = getter() if callable(getter) else None
        except (NotImplementedError, AttributeError):
            table = None
        if isinstance(table, nn.Embedding):
            return table.num_embeddings
        size = self.setting("vocab_size")
        return size if isinstance(size, int) and size > 0 else None

    def length(self) -> int:
        """Tokens that fit the model's table of positions."""
        known = [DEFAULT_LENGTH]
        for config in self.configs():
            found = [getattr(config, name, None) for name in POSITIONS]
            known += [size for size in found if isinstance(size, int) and size > 0]
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
                known.append(module.num_embeddings - module.padding_idx - 1)  # positions are counted from behind it
        return min(known)

    def ids(self) -> torch.Tensor | None:
        """Token ids; none is the padding id, which some models leave out of their attention."""
        vocabulary = self.vocabulary()
        if vocabulary is None:
            return None
        drawn = random_ids((1, self.length()), vocabulary, self.device)
        padding = self.setting("pad_token_id")
        if not isinstance(padding, int) or vocabulary < 2:
            return drawn
        return torch.where(drawn == padding, (padding + 1) % vocabulary, drawn)

    def ids_for_decoder(self) -> torch.Tensor:
        """A decoder reads half as much, so that its length is told from the encoder's."""
        limit = self.setting("vocab_size")
        ids = random_ids((1, max(1, self.length() // 2)), limit if isinstance(limit, int) else 2, self.device)
        start = self.setting("decoder_start_token_id")
        if isinstance(start, int):
            ids[:, 0] = start
        return ids

    def image(self) -> torch.Tensor:
        """One picture."""
        size = self.setting("image_size") or DEFAULT_IMAGE
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        return random_floats((1, self.setting("num_channels") or 3, height, width), self.device, self.dtype)

    def waveform(self) -> torch.Tensor:
        """A moment of sound."""
        return random_floats((1, DEFAULT_SAMPLES), self.device, self.dtype)

    def spectrogram(self) -> torch.Tensor | None:
        """As many frames as the encoder's table of positions has, two to one."""
        bins, positions = self.setting("num_mel_bins"), self.setting("max_source_positions")
        if not isinstance(bins, int) or not isinstance(positions, int):
            return None
        return random_floats((1, bins, 2 * positions), self.device, self.dtype)


def _first_layer_shape(model: nn.Module) -> tuple[int, ...] | None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            return (8, module.in_features)
        if isinstance(module, nn.Conv2d):
            return (2, module.in_channels, 64, 64)
        if isinstance(module, nn.Conv1d):
            return (2, module.in_channels, 256)
    return None
