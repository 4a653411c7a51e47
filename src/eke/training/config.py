"""`RunConfig`: the typed, checked content of `run.toml`.

Properties: every key has a default; an unknown key, a wrong unit or an impossible combination is
one `InputError` that names the key, the value, the rule and the nearest thing that would work;
`RunConfig.from_toml(c.to_toml())` equals `c`. Nothing heavy is imported: a mistake is found
before torch is.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from eke.budget.budget import Budget
from eke.budget.units import parse_bytes, parse_count, parse_duration
from eke.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Auto = Literal["auto"]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python counts True as 1, and so would pydantic.
        if isinstance(value, bool) and (
            cls.model_fields[str(info.field_name)].annotation is not bool
        ):
            raise ValueError("true and false mean nothing here")
        return value


class RunSection(_Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    dir: str = "runs"
    seed: int = Field(0, ge=0, lt=2**32)
    deterministic: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("name")
    @classmethod
    def _not_a_parent(cls, value: str) -> str:
        if value in (".", ".."):
            raise ValueError("it names a new directory inside run.dir")
        return value


class ModelSection(_Section):
    """Which model. `dtype` is what is computed in; weights and optimizer state are fp32."""

    source: str = "builtin:tiny"
    tokenizer: str | None = None
    dtype: Literal["auto", "fp32", "bf16"] = "auto"

    @field_validator("tokenizer")
    @classmethod
    def _has_files(cls, value: str | None) -> str | None:
        if value is not None and value.startswith("builtin:"):
            raise ValueError(
                "a built-in model has no tokenizer of its own, it learns one from data.train: "
                "name a folder or a hub id, or leave the key out"
            )
        return value


class DataSection(_Section):
    """What to train on, what to evaluate on, and how rows become samples."""

    train: str | list[str] = "builtin:pydocs"
    eval: str | list[str] | None = None
    format: Literal["auto", "text", "prompt", "chat"] = "auto"
    max_length: int | Auto = Field("auto")
    overlength: Literal["auto", "error", "truncate", "solo", "skip"] = "auto"
    eval_examples: int | Auto = "auto"
    workers: int | Auto = "auto"

    @field_validator("max_length")
    @classmethod
    def _long_enough(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError(
                "a sample needs at least 2 tokens: one to predict from, one to predict"
            )
        return value

    @field_validator("eval_examples")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("an error bar needs at least 2 examples")
        return value

    @field_validator("workers")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("it is 0 or more")
        return value


class BudgetSection(_Section):
    """Hard limits, as people write them; see `eke.Budget`."""

    memory: str | int | None = None
    wall_time: str | float | None = None
    flops: str | float | None = None
    tokens: str | float | None = None
    steps: str | int | None = None
    epochs: int | None = None
    energy: str | float | None = None
    cost: str | float | None = None
    price_per_hour: str | float | None = None

    def parse(self) -> Budget:
        """The limits as numbers. Raises InputError."""
        return Budget.parse(**self.model_dump())


class BatchSection(_Section):
    """What one optimizer step consumes, and what fits in one pass of the model."""

    per_step: str = "auto"
    micro_tokens: int | Auto = "auto"
    window: int = Field(1024, ge=1)
    packing: bool = False
    loss: Literal["token", "sample", "sequence"] = "token"
    order_seed: int | None = Field(None, ge=0, lt=2**32)

    @field_validator("per_step", mode="before")
    @classmethod
    def _per_step(cls, value: Any) -> Any:
        if value == "auto":
            return value
        kind, _, number = str(value).partition(":")
        if kind not in ("tokens", "samples") or not number.isdecimal() or int(number) < 1:
            raise ValueError('it is "tokens:N", "samples:N" or "auto", with N at least 1')
        return value

    @field_validator("micro_tokens")
    @classmethod
    def _micro(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError("it is at least 2 tokens")
        return value


class OptimizerSection(_Section):
    """AdamW with a warm-up, stable, decay schedule."""

    lr: float | Auto = "auto"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    clip: float = Field(1.0, ge=0)
    warmup_steps: int | Auto = "auto"

    @field_validator("lr")
    @classmethod
    def _positive(cls, value: float | str) -> float | str:
        if isinstance(value, float) and not 0 < value < 10:
            raise ValueError("it is more than 0 and less than 10")
        return value

    @field_validator("betas")
    @classmethod
    def _averages(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("each is at least 0 and less than 1")
        return value

    @field_validator("warmup_steps")
    @classmethod
    def _not_negative(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise ValueError("it is 0 or more")
        return value


class GovernorSection(_Section):
    """When to stop. `actions = []` leaves only the budget to end the run."""

    actions: tuple[Literal["decay", "rollback"], ...] = ("decay", "rollback")
    epsilon: float = Field(0.015, gt=0, lt=1)
    min_gain: float | None = Field(None, gt=0)
    patience: int = Field(2, ge=1)
    reserve: float = Field(0.10, ge=0, le=0.5)
    eval_every: str = "auto"
    eval_share: float = Field(0.03, gt=0, le=0.5)

    @field_validator("eval_every", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> str:
        return _cadence(value, allow_auto=True, allow_time=False)


class CheckpointSection(_Section):
    """How often to save, and which saves to keep."""

    every: str = "auto"
    keep_last: int = Field(3, ge=1)
    keep_every: str | None = None
    mtbf: str | float = "6h"
    pool: str | int = "auto"

    @field_validator("every", mode="before")
    @classmethod
    def _when(cls, value: Any) -> str:
        return _cadence(value, allow_auto=True, allow_time=True)

    @field_validator("keep_every", mode="before")
    @classmethod
    def _which(cls, value: Any) -> str | None:
        # A saved step knows its number, not its time.
        return None if value is None else _cadence(value, allow_auto=False, allow_time=False)

    @field_validator("pool")
    @classmethod
    def _pool(cls, value: str | int) -> str | int:
        if value != "auto" and parse_bytes(value, "checkpoint.pool") < 2**20:
            raise ValueError("it is auto, or at least 1MiB")
        return value

    @field_validator("mtbf")
    @classmethod
    def _duration(cls, value: str | float) -> str | float:
        if parse_duration(value, "checkpoint.mtbf") == 0:
            raise ValueError("a machine runs for some time between failures")
        return value


class LogSection(_Section):
    """What is printed."""

    every: int = Field(10, ge=1)


class Cadence(BaseModel):
    """`50 steps` or `2m`: one of the two is set. A number alone is a number of steps."""

    model_config = ConfigDict(frozen=True)
    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str, *, allow_time: bool = True) -> Cadence:
        """From text; raises ValueError (which InputError is not, so pydantic can report it)."""
        try:
            if text.rstrip().endswith(("step", "steps")) or text.strip().isdecimal():
                steps = parse_count(text, "a cadence")
                if steps >= 1 and steps == int(steps):
                    return cls(steps=int(steps))
            elif allow_time:
                seconds = parse_duration(text, "a cadence")
                if seconds > 0:
                    return cls(seconds=seconds)
        except InputError:
            pass  # reported below, with the forms that this key takes
        raise ValueError(
            'it is a number of steps such as "50 steps"'
            + (' or a time such as "2m"' if allow_time else "")
        )


def _cadence(value: object, *, allow_auto: bool, allow_time: bool) -> str:
    """The text of a cadence, checked; raises ValueError with the forms that it takes."""
    text = str(value)
    if text != "auto" or not allow_auto:
        Cadence.parse(text, allow_time=allow_time)
    return text


class RunConfig(_Section):
    """A whole `run.toml`."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    budget: BudgetSection = BudgetSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    governor: GovernorSection = GovernorSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return Path(self.run.dir).expanduser() / (self.run.name or "run")

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
        """Read a `run.toml`, then apply `section.key=value` overrides.

        An unnamed run is called after the file.

        Raises:
            InputError: the file is missing, is not TOML, or breaks a rule.
        """
        path = Path(path)
        try:
            raw = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise InputError(
                "there is no such configuration file",
                value=str(path),
                fix="Give the path of a run.toml",
            ) from error
        except IsADirectoryError as error:
            raise InputError(
                "the configuration is a folder",
                value=str(path),
                fix=f"Give the file in it: {path / 'run.toml'}",
            ) from error
        except OSError as error:
            raise InputError(
                f"the configuration cannot be read: {error.strerror}",
                value=str(path),
                fix="Give the path of a run.toml that you may read",
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path} is not TOML: {error}", fix="Mend that line; strings need quotes"
            ) from error
        for override in overrides:
            _override(raw, override)
        config = cls.from_mapping(raw, origin=str(path))
        if not config.run.name:
            name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip(".-")
            config = config.with_values({"run": {"name": name or "run"}})
        return config

    @classmethod
    def from_mapping(cls, raw: dict[str, Any], origin: str = "the configuration") -> RunConfig:
        """Check nested plain values. Raises InputError naming the first offending key."""
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            raise _explain(error, origin) from error
        config.budget.parse()
        return config

    def with_values(self, values: dict[str, dict[str, Any]]) -> RunConfig:
        """A copy with some keys set, checked again."""
        raw = self.model_dump()
        for section, keys in values.items():
            raw[section].update(keys)
        return self.from_mapping(raw)

    def to_toml(self) -> str:
        """The configuration as TOML; keys without a value are left out."""
        return tomli_w.dumps(_without_none(self.model_dump(mode="json")))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return list(value) if isinstance(value, tuple) else value


def _override(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2 or not all(parts):
        raise InputError(
            "cannot read an override",
            value=override,
            rule="it is section.key=value",
            fix="Write it like --set budget.flops=1e15",
        )
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()  # a bare word is a string: --set budget.wall_time=30m
    section = raw.setdefault(parts[0], {})
    if isinstance(section, dict):
        section[parts[1]] = value


def _explain(error: ValidationError, origin: str) -> InputError:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][:2]]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        return _unknown(where, origin)
    if not key:
        return InputError(origin, rule=first["msg"].removeprefix("Value error, "))
    value = first["input"]
    if first["type"] == "model_type":
        return InputError(
            f"{origin}: {key}",
            value=value,
            rule="it is a section",
            fix=f"Write [{key}] and its keys below it: {', '.join(_keys(key))}",
        )
    # A union reports each member's failure under the same key: tell all of their rules once.
    same = [e for e in error.errors() if [str(p) for p in e["loc"][:2]] == where]
    rules = list(dict.fromkeys(e["msg"].removeprefix("Value error, ") for e in same))
    fix = f"Correct {key}"
    if len(where) == 2:
        default = getattr(getattr(RunConfig(), where[0]), where[1])
        fix += ", or leave it out" + (f" for {default!r}" if default not in (None, "") else "")
    return InputError(f"{origin}: {key}", value=value, rule=" or ".join(rules), fix=fix)


def _keys(section: str) -> list[str]:
    return list(type(getattr(RunConfig(), section)).model_fields)


def _unknown(where: list[str], origin: str) -> InputError:
    """An unknown section or key: what is known there, and the nearest name, here or elsewhere."""
    name, sections = where[-1], list(RunConfig.model_fields)
    known = sections if len(where) == 1 else _keys(where[0])
    near = difflib.get_close_matches(name, known, n=1)
    near += [f"{section}.{name}" for section in sections if name in _keys(section)]
    return InputError(
        f"{origin} has an unknown {'section' if len(where) == 1 else 'key'} {'.'.join(where)!r}",
        rule=f"known here: {', '.join(known)}",
        fix=f"Did you mean {near[0]!r}? If not, remove it" if near else "Remove it",
    )
