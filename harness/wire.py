"""Records to JSON and back; parsed and validated once, at the door, with pydantic."""

import json
import math
from functools import lru_cache
from typing import Any, TypeVar

Record = TypeVar("Record")


def _adapter(kind: Any) -> Any:
    return _built(kind)


@lru_cache(maxsize=64)
def _built(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def to_json(record: object) -> str:
    """One line of strict JSON for a record."""
    return json.dumps(to_data(record), ensure_ascii=False, allow_nan=False)


def to_data(record: object) -> Any:
    """The JSON-ready value of a record: enums and non-finite floats as strings ("inf"), tuples as lists."""
    return _finite(_adapter(type(record)).dump_python(record, mode="json"))


def _finite(value: Any) -> Any:
    """JSON has no infinity; pydantic reads the string back as the float."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def from_json(kind: type[Record], text: str | bytes) -> Record:
    """Parse and check; raises pydantic.ValidationError naming the field."""
    parsed: Record = _adapter(kind).validate_json(text)
    return parsed


def from_data(kind: type[Record], data: object) -> Record:
    """Check a value parsed before."""
    parsed: Record = _adapter(kind).validate_python(data)
    return parsed
