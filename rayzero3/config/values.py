"""Values as people write them: times, sizes, counts; and Section, the closed mapping that they stand in."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration_s(value: object) -> object:
    """Seconds from `90`, `90s`, `30m`, `2h` or `1d`; anything else is returned for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", value)):
        return float(match[1]) * _SECONDS[match[2]]
    return value


def parse_size_bytes(value: object) -> object:
    """Bytes from `512MiB`, `16GiB` or a whole number; anything else is returned for pydantic to refuse."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])iB\s*", value)):
        return round(float(match[1]) * 2 ** (10 * (1 + "KMGT".index(match[2]))))
    return value


Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Size = Annotated[int, BeforeValidator(parse_size_bytes), Field(strict=True, ge=0)]
Duration = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0)]


class Section(BaseModel):
    """A part of the job file: closed (unknown keys are refused) and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
