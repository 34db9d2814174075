"""Reads how kernels run best from tables that were measured, a folder for each family of GPUs:

    tunings/sm_90/decode_attention.json
            GPU   choice
    {"rows": [{"up_to": {"num_units": 16}, "take": {"tile": 64, ...}, "note": "..."}, ..., {...}]}

The first row whose conditions hold is taken; the last has none, so that every shape finds one. A
GPU takes the table in the folder of its own name, else that of its family, which is its compute
capability, else that of its shared memory, else that of `GENERAL`, and the log says so once.

What follows from a shape by arithmetic, as how many parts fill the SMs, is a function beside the
kernel, which is given to the table as `fit`. What a kernel can compute at all stays in its code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from tandem_kernels.device import gpu_names

logger = logging.getLogger(__name__)

TABLES = Path(__file__).parent
GENERAL = "sm_90"
"""The family whose tables all other GPUs take: measured on H200s."""
_KEPT = 4096
"""Choices that a table keeps: more shapes than the steps of a second have."""

_Taken = TypeVar("_Taken")
_Tuning = TypeVar("_Tuning")


class TableError(ValueError):
    """Raised for a file that is no table of its choice; says which row is wrong."""


class TuningRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Holds what is taken where all conditions hold; each names facts of the shape.

    Attributes:
        up_to, at_least: Bounds, which are included.
        equal: Of facts that are true or false, or one of few numbers.
        multiple_of: Divisors.
        take: Fields of the tuning.
        note: What was measured.
    """

    take: dict[str, Any]
    up_to: dict[str, int] = {}
    at_least: dict[str, int] = {}
    equal: dict[str, int | bool] = {}
    multiple_of: dict[str, int] = {}
    note: str = ""

    @property
    def facts(self) -> set[str]:
        """Returns the names of the facts that it asks for."""
        return {*self.up_to, *self.at_least, *self.equal, *self.multiple_of}

    def holds(self, facts: Mapping[str, int]) -> bool:
        """Returns whether all conditions hold for a shape."""
        return (
            all(facts[name] <= most for name, most in self.up_to.items())
            and all(facts[name] >= least for name, least in self.at_least.items())
            and all(facts[name] == value for name, value in self.equal.items())
            and all(facts[name] % divisor == 0 for name, divisor in self.multiple_of.items())
        )

    def __str__(self) -> str:
        parts = [f"{name} <= {most}" for name, most in self.up_to.items()]
        parts += [f"{name} >= {least}" for name, least in self.at_least.items()]
        parts += [f"{name} = {value}".lower() for name, value in self.equal.items()]
        parts += [f"{name} a multiple of {number}" for name, number in self.multiple_of.items()]
        return ", ".join(parts) or "all others"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: tuple[TuningRow, ...]


@dataclass(frozen=True, slots=True)
class TuningChoice(Generic[_Tuning]):
    """One answer of a table.

    Attributes:
        table: Its folder and name, `sm_90/decode_attention`.
        number: Of the row, from 1 on.
    """

    table: str
    number: int
    row: TuningRow
    tuning: _Tuning

    def __str__(self) -> str:
        if self.number == 1 and not self.row.facts:
            return self.table
        return f"{self.table} row {self.number}: {self.row}"


_asked: list[TuningChoice[Any]] | None = None


@contextmanager
def asked_choices() -> Iterator[list[TuningChoice[Any]]]:
    """Gives a list that is filled with what tables answer inside the context."""
    global _asked
    before, _asked = _asked, []
    try:
        yield _asked
    finally:
        _asked = before


class TuningTable(Generic[_Taken, _Tuning]):
    """The choice of one kernel, or among some, on any GPU."""

    def __init__(
        self,
        name: str,
        form: type[_Taken],
        facts: tuple[str, ...],
        fit: Callable[..., _Tuning],
        tables: Path = TABLES,
    ) -> None:
        """Reads nothing yet.

        Args:
            name: Of the file.
            form: The dataclass of what a row takes.
            facts: Names of what `choose` is given, in order.
            fit: Makes a tuning of what was taken and of all facts.
        """
        self.name, self.form, self.facts = name, form, facts
        self._fit, self._tables = fit, tables
        self._answer = lru_cache(maxsize=_KEPT)(self._find)

    def choose(self, device: torch.device, *facts: int) -> _Tuning:
        """Returns how a shape runs best on a device; one that is no GPU answers as `GENERAL`."""
        choice = self._answer(gpu_names(device), facts)
        if _asked is not None:
            _asked.append(choice)
        return choice.tuning

    def _find(self, gpu: tuple[str, ...], facts: tuple[int, ...]) -> TuningChoice[_Tuning]:
        folder = folder_of(self.name, gpu, self._tables)
        named = dict(zip(self.facts, facts, strict=True))
        for number, (row, taken) in enumerate(self.rows(folder), 1):
            if row.holds(named):
                tuning = self._fit(taken, *facts)
                return TuningChoice(f"{folder}/{self.name}", number, row, tuning)
        raise AssertionError("the last row of a table has no conditions")

    @cache  # noqa: B019  tables are made once, when their module is imported
    def rows(self, folder: str) -> tuple[tuple[TuningRow, _Taken], ...]:
        """Returns the rows of a folder's table, and what they take.

        Raises:
            TableError: The file is no table of this choice.
        """
        path = self._tables / folder / f"{self.name}.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=_File).rows
        except msgspec.DecodeError as error:
            raise TableError(f"{path}: {error}") from error
        if not found or found[-1].facts or not all(row.facts for row in found[:-1]):
            raise TableError(f"{path}: the last row, and no other, must be without conditions")
        return tuple((row, self._taken(path, number, row)) for number, row in enumerate(found, 1))

    def _taken(self, path: Path, number: int, row: TuningRow) -> _Taken:
        known = {field.name for field in fields(self.form)}  # type: ignore[arg-type]
        for kind, names, all_names in (
            ("facts", row.facts, set(self.facts)),
            ("fields", set(row.take), known),
        ):
            if unknown := sorted(names - all_names):
                raise TableError(
                    f"{path}, row {number}: unknown {kind} {', '.join(unknown)}; there are "
                    f"{', '.join(sorted(all_names))}"
                )
        try:
            return msgspec.convert(row.take, self.form)
        except msgspec.ValidationError as error:
            raise TableError(f"{path}, row {number}: {error}") from error


def plain_table(
    name: str, form: type[_Taken], facts: tuple[str, ...], tables: Path = TABLES
) -> TuningTable[_Taken, _Taken]:
    """Returns a table whose rows hold tunings as they are."""
    return TuningTable(name, form, facts, lambda taken, *facts: taken, tables)


@cache
def folder_of(name: str, gpu: tuple[str, ...], tables: Path = TABLES) -> str:
    """Returns the folder whose table a GPU takes, by the names that `gpu_names` gives it."""
    for folder in gpu:
        if (tables / folder / f"{name}.json").is_file():
            return folder
    if gpu:
        _say_general(gpu)
    return GENERAL


@cache
def _say_general(gpu: tuple[str, ...]) -> None:
    logger.warning(
        "tables of tunings are missing for %s: GEMMs and attention take those of %s, which are "
        "right, and may be slower than others would be",
        " or ".join(gpu),
        GENERAL,
    )
