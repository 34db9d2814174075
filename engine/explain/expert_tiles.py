"""Names the kernels and tiles of experts, by the functions that the launchers themselves ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tandem_kernels.device import gpu_name, shared_bytes
from tandem_kernels.experts.expert_tuning import (
    FIXED,
    TABLES,
    ExpertShape,
    ExpertTuning,
    Range,
    expert_range,
    expert_tuning,
    nearest_shape,
)


def fields_of(tuning: Any, *names: str) -> str:
    """Returns fields of a tuning as tables of launches have them."""
    return ", ".join(f"{name.removeprefix('num_')} {getattr(tuning, name)}" for name in names)


def plain_experts(
    x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, experts: Tensor, fixed: bool = False,
    b13: Any = None, b2: Any = None, gate: Any = None, summed: bool = True, ranks: int = 1,
) -> tuple[str, str]:  # fmt: skip
    is_plain = not fixed and b13 is None and b2 is None
    if is_plain and (tiles := _one_row(x, w13, w2, None)):
        return "one_row_expert_kernel", tiles
    shape, own = ExpertShape.of_plain(w13, w2), experts.numel() / ranks
    tunings = _Tunings(shape, x, own, FIXED if fixed else None)
    parts = w13.shape[1] // w2.shape[2]
    return "fused_experts kernels", tunings.within(x.element_size(), lambda _: parts, lambda _: 1)


def experts_beside(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    gate: Any = None,
) -> tuple[str, str]:
    from tandem_kernels.experts.one_row_experts import SharedWeights

    beside = f"; a shared expert of width {shared_w2.shape[1]} in the first programs"
    if tiles := _one_row(x, w13, w2, SharedWeights(shared_w13, shared_w2)):
        return "one_row_expert_kernel", tiles + beside
    kernels, tiles = plain_experts(x, w13, w2, weights, experts)
    return kernels, tiles + beside


def _one_row(x: Tensor, w13: Tensor, w2: Tensor, shared: Any) -> str:
    """Returns the tiles of one token's experts; nothing if these do not compute them."""
    from tandem_kernels.experts.one_row_experts import one_row_tuning, takes_one_row

    if not takes_one_row(x, w13, w2, shared):
        return ""
    both = one_row_tuning(w13.shape[1] // w2.shape[2], w13.shape[2]), one_row_tuning(1, w2.shape[2])
    tiles = [fields_of(each, "cols", "depth", "num_warps") for each in both]
    return f"gate·up {tiles[0]}; down {tiles[1]}"


def fp8_experts(x: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, weights: Tensor,
                 experts: Tensor, fixed: bool = False, b13: Any = None, b2: Any = None,
                 gate: Any = None, summed: bool = True,
                 ranks: int = 1) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.experts.fp8 import experts as fp8_experts
    from tandem_kernels.experts.fp8.ahead_shapes import HEIGHT, multiplies_ahead

    biased = b13 is not None or b2 is not None
    if not fixed and multiplies_ahead(x, w13, experts.numel(), biased=biased, gate=gate):
        return "fp8_experts_ahead_kernel", f"at most {HEIGHT} rows, warps 9"
    shape = ExpertShape(len(w2), w2.shape[2], w2.shape[1], fp8_experts.FORMAT)
    one = fp8_experts.FIXED if fixed else None
    tunings, strips = _Tunings(shape, x, experts.numel() / ranks, one), fp8_experts.strips_of
    parts = w13.shape[1]
    return "fp8_experts kernels", tunings.within(
        1, lambda tuning: parts * strips(parts, tuning), lambda tuning: strips(1, tuning)
    )


def fp4_experts(x: Tensor, w13: Tensor, w2: Tensor, width: int, weights: Tensor,
                 experts: Tensor, fixed: bool = False, b13: Any = None, b2: Any = None,
                 gate: Any = None, summed: bool = True, f13: Any = None, f2: Any = None,
                 ranks: int = 1) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.experts.fp4 import experts as fp4_experts
    from tandem_kernels.experts.fp4.ahead_shapes import HEIGHT, multiplies_ahead
    from tandem_kernels.experts.fp4.few_rows.shapes import expert_warp_tuning, takes_few_rows
    from tandem_kernels.experts.fp4.pair_shapes import format_of

    given = x, w13, width, experts.numel()
    if not fixed and multiplies_ahead(*given, biased=b13 is not None or b2 is not None, gate=gate):
        return "fp4_experts_ahead_kernel", f"at most {HEIGHT} rows, warps 8"
    shape = ExpertShape(len(w2), width, x.shape[1], format_of(w13))
    own = experts.numel() / ranks
    tunings = _Tunings(shape, x, own, fp4_experts.FIXED if fixed else None)
    if tunings.share_out and takes_few_rows(x, w13, experts, width, gate):
        tiles = fields_of(expert_warp_tuning(x.device, width, x.shape[1]), "ahead", "strips")
        return "fp4_few_row_gate_up_kernel, fp4_experts kernels", tunings.behind(tiles)
    return "fp4_experts kernels", str(tunings)


def fp4_routed(x: Tensor, logits: Tensor, slots: Tensor, residual: Tensor, w13: Tensor,
                w2: Tensor, width: int, top_k: int, **rest: Any) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.experts.fp4.one_row.shapes import one_row_tuning, takes_one_row
    from tandem_kernels.experts.fp4.pair_shapes import format_of

    if takes_one_row(x, w13, width, top_k, rest.get("gate")):
        tuning = one_row_tuning(x.device, width, x.shape[1])
        tiles = fields_of(tuning, "warps", "ahead", "down_warps", "down_ahead")
        return "fp4_one_row_gate_up_kernel, fp4_one_row_down_kernel", tiles
    shape = ExpertShape(len(w2), width, x.shape[1], format_of(w13))
    return "fp4_pair_gemm_kernel, choice in the first", str(_Tunings(shape, x, len(x) * top_k))


class _Tunings:
    """The tiles of both GEMMs of experts, and which rows of which table have them."""

    def __init__(
        self, shape: ExpertShape, on: Tensor, num_pairs: float, fixed: ExpertTuning | None = None
    ) -> None:
        """Asks as the launchers do. `fixed`: one choice for all batches; None: by the pairs."""
        self._device = on.device
        if fixed is not None or not shape.has_tables:
            alone = Range(None, fixed or expert_tuning(shape, num_pairs, "", gated=True))
            self._found, self._source = (alone, alone), "one for all batches"
            return
        gpu = gpu_name(on.device)
        first, second = (
            expert_range(shape, num_pairs, gpu, gated=is_gated) for is_gated in (True, False)
        )
        of, table = nearest_shape(shape, gpu, TABLES)
        rows = ", down ".join(map(_rows_of, (first, second)))
        self._found = first, second
        self._source = f"table {of}/{table.file_name.removesuffix('.json')}, gate·up {rows}"

    @property
    def share_out(self) -> bool:
        """Returns whether programs of the first GEMM share all tiles out evenly."""
        return self._found[0].tuning.runs > 0

    def within(self, itemsize: int, *matrices: Callable[[ExpertTuning], int]) -> str:
        """Describes them with as few stages as shared memory has room for. `matrices`: for each
        GEMM, how many weights a tile of such a tuning multiplies."""
        room = shared_bytes(self._device)
        return self._described(
            found.tuning.within(room, count(found.tuning), itemsize)
            for found, count in zip(self._found, matrices, strict=True)
        )

    def __str__(self) -> str:
        return self._described(found.tuning for found in self._found)

    def behind(self, first: str) -> str:
        """Describes the second GEMM behind a first one whose tiles are not those found."""
        return self._both(first, _tile(self._found[1].tuning))

    def _described(self, tunings: Iterable[ExpertTuning]) -> str:
        return self._both(*map(_tile, tunings))

    def _both(self, first: str, second: str) -> str:
        return f"gate·up {first}; down {second}; {self._source}"


def _rows_of(found: Range) -> str:
    return "any rows" if found.up_to is None else f"up to {found.up_to:g} rows an expert"


def _tile(tuning: ExpertTuning) -> str:
    sizes = f"{tuning.rows} x {tuning.cols} x {tuning.depth}"
    shared = f", {tuning.runs} even runs an SM" if tuning.runs else ""
    way = ", each pair by itself" if tuning.each_pair else shared
    return f"{sizes}, warps {tuning.num_warps}, stages {tuning.num_stages}{way}"
