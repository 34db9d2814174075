"""The reader of compiled code counts the rounds in which a kernel asks for memory."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from rounds_of_loads import rounds_in

FIRST, SECOND = "LDG.E.128 R4, desc[UR6][R2.64]", "@P0 LDG.E.128 R8, desc[UR6][R2.64+0x1000]"


def code(*instructions: str) -> str:
    return "\n".join(f"        /*0010*/              {one} ;" for one in instructions)


def test_what_is_asked_for_before_anything_is_used_is_one_round() -> None:
    assert rounds_in(code(FIRST, SECOND, "STS.128 [R30], R4", "STS.128 [R30+0x10], R8")) == 1


@pytest.mark.parametrize(
    "use", ["STS.128 [R30], R4", "FADD R5, R20, R7", "PRMT R21, R6, 0x7632, R6"]
)
def test_a_vector_that_is_used_first_ends_its_round(use: str) -> None:
    assert rounds_in(code(FIRST, use, SECOND, "STS.128 [R30+0x10], R8")) == 2


@pytest.mark.parametrize(
    "use", ["CS2R R8, SRZ", "FADD R4, R20, R21", "LDG.E R24, desc[UR6][R2.64]"]
)
def test_what_uses_no_vector_ends_no_round(use: str) -> None:
    assert rounds_in(code(FIRST, use, SECOND)) == 1


def test_an_address_that_was_loaded_begins_a_round() -> None:
    block = "LDG.E.64 R2, desc[UR6][R40.64]"
    assert rounds_in(code(block, FIRST, SECOND)) == 2
