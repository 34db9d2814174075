"""The reader of compiled code finds registers that are written too soon, and no others."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from registers_in_flight import multiplies_from_registers, waited_for_alone, written_in_flight

PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R{}, gdesc[UR8], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{}"


def loop(*instructions: str) -> str:
    lines = [".L_x_7:", *(f"        /*0010*/  {one} ;" for one in instructions)]
    return "\n".join([*lines, "        /*0020*/  @P1 BRA `(.L_x_7) ;"])


def test_a_register_of_the_last_turn_is_written_before_any_wait() -> None:
    write = "LDS.128 R62, [R60+0x9800]"
    assert written_in_flight(loop(write, PRODUCT.format(64))) == [write]


def test_a_wait_for_all_makes_every_register_free() -> None:
    sass = loop(WAIT.format(0), "LDS.128 R64, [R60]", PRODUCT.format(64), PRODUCT.format(68))
    assert written_in_flight(sass) == []


def test_a_wait_for_some_leaves_the_last_groups_in_flight() -> None:
    first, last = "HMUL2.BF16_V2 R64, R1, R2", "@!P3 HMUL2.BF16_V2 R68, R1, R2"
    products = PRODUCT.format(64), PRODUCT.format(68)
    assert written_in_flight(loop(WAIT.format(1), first, *products)) == []
    assert written_in_flight(loop(WAIT.format(1), last, *products)) == [last[5:]]
    assert written_in_flight(loop(WAIT.format(2), first, *products)) == [first]


def test_a_group_of_two_products_reads_the_registers_of_both() -> None:
    open_product = PRODUCT.format(64).removesuffix(", gsb0")
    write = "IMAD.WIDE R66, R1, 0x4, R2"
    assert written_in_flight(loop(write, open_product, PRODUCT.format(80))) == [write]
    assert written_in_flight(loop(open_product, write, PRODUCT.format(80), WAIT.format(0)))


def test_stores_and_other_registers_are_no_faults() -> None:
    others = "STS.128 [R64], R8", "LDGSTS.E.BYPASS.128 [R64], desc[UR4][R2.64]", "MOV R63, R64"
    assert written_in_flight(loop(*others, "LDS.64 R68, [R1]", PRODUCT.format(64))) == []


def test_only_loops_that_multiply_from_registers_are_read() -> None:
    shared = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    assert written_in_flight(loop("MOV R64, R1", shared)) == []
    assert multiplies_from_registers("wgmma.mma_async.sync {%r1}, {%r2}, %rd1, 1;")
    assert not multiplies_from_registers("wgmma.mma_async.sync {%r1}, %rd2, %rd1, 1;")


def test_products_that_are_waited_for_one_by_one() -> None:
    products = [PRODUCT.format(64 + 4 * i) for i in range(4)]
    each = [line for product in products for line in (product, WAIT.format(0))]
    assert waited_for_alone(loop(*each)) == products
    assert waited_for_alone(loop(*products, WAIT.format(0))) == []
    assert waited_for_alone(loop(*each[:6])) == []
