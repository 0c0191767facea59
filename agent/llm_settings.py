"""Which language models a session asks: overnight.yaml first, flags win. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent.config import LlmConfig
from agent.errors import InputError
from agent.records import LanguageModel, Llm


@dataclass(frozen=True)
class LlmFlags:
    """What the command line says of language models."""

    models: Sequence[str] = ()
    api_base: str | None = None
    api_key_env: str | None = None

    @property
    def given(self) -> bool:
        """Whether it says anything."""
        return bool(self.models) or self.api_base is not None or self.api_key_env is not None

    def words(self) -> list[str]:
        """The flags again, for a command that is started in the background."""
        pairs = [("--llm", model) for model in self.models]
        pairs += [("--api-base", self.api_base)] if self.api_base is not None else []
        pairs += [("--api-key-env", self.api_key_env)] if self.api_key_env is not None else []
        return [word for pair in pairs for word in pair]


def from_config(config: LlmConfig) -> Llm:
    """The settings of overnight.yaml as a record."""
    values = config.model_dump()
    models = tuple(LanguageModel(**one) for one in values.pop("models"))
    return Llm(models=models, **values)


def amended(before: Llm, flags: LlmFlags) -> Llm:
    """The settings with the flags. A model that was set up before keeps its weight, address and key variable."""
    known = {one.model: one for one in before.models}
    models = tuple(known.get(name, LanguageModel(name)) for name in dict.fromkeys(flags.models)) or before.models
    if flags.given and not models:
        raise InputError("--api-base and --api-key-env belong to a model: name it with --llm.")
    changes = {name: value for name in ("api_base", "api_key_env") if (value := getattr(flags, name)) is not None}
    return replace(before, models=tuple(replace(one, **changes) for one in models))


def proposer_name(asked: str | None, before: str, flags: LlmFlags) -> str:
    """The proposer: as asked for; a language model that is named is meant to propose."""
    if flags.given and asked is not None and asked != "llm":
        raise InputError(f"--llm and --api-base go with --proposer llm, not with --proposer {asked}: leave one out.")
    return "llm" if flags.given else before if asked is None else asked
