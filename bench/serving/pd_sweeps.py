"""Lists what `bench.serving.pd` measures: setups one after the other, or one with a setting
swept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.serving.pd_cluster import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One cluster, and the prompts that it gets.

    Attributes:
        name: In tables.
        point: Value of what is swept.
        shared_tokens: Of every prompt, the same each time.
    """

    name: str
    point: str
    setup: Setup
    node_args: tuple[str, ...]
    input_tokens: int
    shared_tokens: int = 0

    @property
    def caches_prefixes(self) -> bool:
        return self.shared_tokens > 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """`at` gives the variant for a point; `setup` where it is measured unless told otherwise."""

    label: str
    points: tuple[str, ...]
    setup: str
    at: Callable[[Variant, str], Variant]


def _flag(name: str, factor: int = 1) -> Callable[[Variant, str], Variant]:
    def at(variant: Variant, point: str) -> Variant:
        return replace(variant, node_args=(*variant.node_args, name, str(int(point) * factor)))

    return at


def _tokens(variant: Variant, point: str) -> Variant:
    return replace(variant, input_tokens=int(point))


def _hit_rate(variant: Variant, point: str) -> Variant:
    return replace(variant, shared_tokens=variant.input_tokens * int(point) // 100)


def _ratio(variant: Variant, point: str) -> Variant:
    transport = variant.setup.transport
    name = point if transport == "auto" else f"{point}-{transport}"
    return replace(variant, setup=Setup.parse(name))


SWEEPS = {
    "ratio": Sweep(
        "prefill and decode nodes", ("1p1d", "2p1d", "1p2d", "3p1d"), "1p1d-cuda_ipc", _ratio
    ),
    "tokens": Sweep(
        "tokens of the prompt", ("500", "2000", "8000", "32000"), "1p1d-stream", _tokens
    ),
    "block-size": Sweep(
        "tokens of a block", ("16", "64", "128", "256"), "1p1d-stream", _flag("--block-size")
    ),
    "streams": Sweep("streams", ("1", "2", "4", "8", "16"), "1p1d-stream", _flag("--kv-streams")),
    "processes": Sweep(
        "transfer processes of a rank", ("1", "2", "4", "8"), "1p1d-stream", _flag("--kv-processes")
    ),
    "chunk-kib": Sweep(
        "KiB of a chunk", ("512", "1024", "2048", "4096"), "1p1d-stream",
        _flag("--kv-chunk-bytes", 1024),
    ),
    "hit-rate": Sweep(
        "% of the prompt that was there before", ("0", "40", "80"), "1p1d-stream", _hit_rate
    ),
}  # fmt: skip


def variants(args: argparse.Namespace) -> list[Variant]:
    """Raises ValueError for a setup that does not exist."""
    plain = Variant(
        name="",
        point="",
        setup=Setup.parse("one"),
        node_args=tuple(args.node_args.split()),
        input_tokens=args.input_tokens,
    )
    if not args.sweep:
        names = (args.setups or "1p1d-cuda_ipc,1p1d-stream,one").split(",")
        return [replace(plain, name=name, point=name, setup=Setup.parse(name)) for name in names]
    sweep = SWEEPS[args.sweep]
    base = replace(plain, setup=Setup.parse(args.setups or sweep.setup))
    return [
        replace(sweep.at(base, point), name=f"{args.sweep} {point}", point=point)
        for point in (args.points.split(",") if args.points else sweep.points)
    ]
