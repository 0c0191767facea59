"""overnight.yaml: read once, checked, unknown keys refused with the nearest known one; flags win over it."""

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.errors import InputError
from harness.records import LibraryPolicy

CONFIG_NAME = "overnight.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class BudgetConfig(_Section):
    """What a night may use up; None means no limit of that kind."""

    hours: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    experiments: int | None = Field(default=None, ge=0)
    dollars: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    tokens: int | None = Field(default=None, ge=0)
    calls: int | None = Field(default=None, ge=0)


class LanguageModel(_Section):
    """One model that proposes. Keys come from the environment variable `api_key_env`, never from here."""

    model: str
    api_base: str | None = None
    weight: float = Field(default=1.0, gt=0)
    api_key_env: str | None = None


class LlmConfig(_Section):
    """The `llm` proposer."""

    models: list[LanguageModel] = []
    max_tokens: int = Field(default=16384, gt=0)
    first_token_timeout_s: float = Field(default=120.0, gt=0)
    stall_timeout_s: float = Field(default=60.0, gt=0)
    call_timeout_s: float = Field(default=600.0, gt=0)


class CommandConfig(_Section):
    """The `command` proposer: prompt on stdin, file on stdout."""

    argv: list[str] = []
    timeout_s: float = Field(default=600.0, gt=0)


class Config(_Section):
    """The whole of overnight.yaml."""

    proposer: str = "playbook"
    library_calls: LibraryPolicy = LibraryPolicy.ALLOW
    executor: Literal["local", "ray"] = "local"
    devices: list[str] = []
    budget: BudgetConfig = BudgetConfig()
    llm: LlmConfig = LlmConfig()
    command: CommandConfig = CommandConfig()
    notify: list[str] = Field(default=[], exclude=True, repr=False)  # may hold secrets: never dumped, never shown


def load_config(root: Path, file: Path | None = None) -> Config:
    """The workspace's overnight.yaml, or `file`; defaults when there is none. Raises InputError naming the key."""
    path = file or root / CONFIG_NAME
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if file:
            raise InputError(f"--config: there is no file {file}.") from error
        return Config()
    except (IsADirectoryError, PermissionError) as error:
        raise InputError(f"{path} cannot be read as a file of settings: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not readable YAML: {_yaml_words(error)}") from None  # its text may hold secrets
    if data is None:
        return Config()
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold settings by name, like `proposer: playbook`.")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{path}: {_explain(error)}") from error


def _yaml_words(error: Exception) -> str:
    """What is wrong and where, without the line itself."""
    mark = getattr(error, "problem_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    words = getattr(error, "problem", None) or getattr(error, "reason", None) or type(error).__name__
    return f"{words}{place}."


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "model_type":
        return f"{place} must hold settings by name: {', '.join(_keys_at(first['loc']))}."
    if first["type"] != "extra_forbidden":
        return f"{place}: {first['msg']}."
    known = _keys_at(first["loc"][:-1])
    key = str(first["loc"][-1])
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]}?" if nearest else f"known are {', '.join(known)}."
    return f"unknown setting {place}: {hint}"


def _keys_at(path: tuple[Any, ...]) -> list[str]:
    section: Any = Config
    for part in path:
        if isinstance(part, int):
            section = LanguageModel
        elif isinstance(part, str):
            section = section.model_fields[part].annotation
    return sorted(section.model_fields) if hasattr(section, "model_fields") else sorted(LanguageModel.model_fields)
