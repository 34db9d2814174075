"""Names the kernels and tiles of a launch, by the functions that the launchers themselves ask.

Kernels' modules import triton, so this does where a GPU is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from engine.explain.launches import Launch
from engine.explain.reasons import OF_STATES
from tandem_kernels.attention.kv_pages import PagedKV, sizes_of
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


def describe(launch: Launch) -> tuple[str, str]:
    """Returns the kernels of a launch and their tiles; tiles that do not depend on shapes are
    left to the kernel's file."""
    known = _KNOWN.get(launch.name)
    if known is None:
        return launch.name, ""
    return known(*launch.arguments)


def _fields(tuning: Any, *names: str) -> str:
    return ", ".join(f"{name.removeprefix('num_')} {getattr(tuning, name)}" for name in names)


def _paged(q: Tensor, kv_cache: PagedKV, metadata: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.decode_tuning import decode_tuning
    from tandem_kernels.attention.paged_attention import kernel_of_decode
    from tandem_kernels.attention.prefill_attention import tuning_of
    from tandem_kernels.attention.prefill_tuning import fixed_tuning

    kernels, tiles, heads = [], [], sizes_of(kv_cache).num_kv_heads
    decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
    kind = kernel_of_decode(q, kv_cache, metadata) if decodes else "prefill"
    if kind == "window":
        kernels.append("window_attention_kernel")
        tiles.append(f"the window of {metadata.window} at once, {decodes} x {heads}")
    elif kind == "decode":
        tuning = decode_tuning(q.device, decodes * heads, q.shape[-1], kv_cache.dtype)
        kernels.append("decode_attention_kernel, merge_kernel")
        tiles.append(_fields(tuning, "tile", "num_warps", "num_stages", "programs_per_sm"))
    if kind == "prefill" or decodes < requests:
        fixed = metadata.fixed_order
        long = fixed_tuning(q.shape[-1], q.dtype) if fixed else tuning_of(q, kv_cache, metadata)
        kernels.append("prefill_attention_kernel")
        tiles.append(_fields(long, "rows", "tile", "num_warps", "num_stages"))
    return "; ".join(kernels), "; ".join(tiles)


def _latent(q_latent: Tensor, q_rope: Tensor, cache: Tensor, metadata: Any, scale: float,
            kv_scales: Any = None) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention.latent_attention import latent_tuning
    from tandem_kernels.attention.latent_decode import kernel_of, tuning_of

    if metadata.num_decodes and not metadata.fixed_order:
        tuning = tuning_of(q_latent, q_rope, cache, metadata, kv_scales)
        kernel = kernel_of(tuning).__name__
        return f"{kernel}, merge_kernel", _fields(tuning, *_OF_HEADS)
    long = latent_tuning(q_latent.device, q_latent.element_size())
    return "latent_attention_kernel", _fields(long, "rows", "tile", "num_warps", "num_stages")


_OF_HEADS = "rows", "tile", "num_warps", "num_stages"
"""Fields of kernels whose programs share the heads of a token."""


def _sparse_latents(q_latent: Tensor, q_rope: Tensor, cache: Tensor, chosen: Tensor, metadata: Any,
                    scale: float, kv_scales: Any = None) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention import sparse_latent_attention as sparse

    is_ahead, heads = sparse.copies_ahead(q_latent, q_rope, metadata, kv_scales), q_latent.shape[1]
    tuning = sparse.sparse_tuning(
        q_latent.device, heads, q_latent.element_size(), is_ahead=is_ahead
    )
    kernel = sparse.kernel_of_copies_ahead(heads) if is_ahead else sparse.sparse_latent_kernel
    return kernel.__name__, _fields(tuning, *_OF_HEADS)


def _index(q: Tensor, head_weights: Tensor, pages: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.index_topk import copies_ahead

    kernel = "index_scores_ahead_kernel" if copies_ahead(q, pages) else "index_scores_kernel"
    return f"{kernel}, select kernels", ""


def _window_rows(q: Tensor, pages: Any, metadata: Any, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.attention.window_rows_attention import AHEAD, window_rows_tuning
    from tandem_kernels.attention.window_rows_shapes import attends_ahead

    if attends_ahead(q, pages, metadata):
        return "window_rows_ahead_kernel", _fields(AHEAD, *_OF_HEADS)
    tuning = window_rows_tuning(q, metadata.fixed_order)
    return "window_rows_kernel", _fields(tuning, *_OF_HEADS)


def _of_blocks(q: Tensor, kv_cache: PagedKV, chosen: Tensor, metadata: Any, choice: Any,
               *rest: Any) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.attention.block_sparse_attention import block_sparse_tuning

    tuning = block_sparse_tuning(q.device, choice.size, q.element_size())
    return "block_sparse_kernel", _fields(tuning, "tile", "num_warps", "num_stages")


def _delta(*arguments: Any) -> tuple[str, str]:
    from tandem_kernels.linear_attention.delta_tuning import decode_tuning

    return _of_states("gated_delta_rule", "delta_rule_kernel", decode_tuning, arguments)


def _mamba(*arguments: Any) -> tuple[str, str]:
    from tandem_kernels.linear_attention.mamba_scan import token_tuning

    return _of_states("mamba_scan", "mamba_scan_kernel", token_tuning, arguments)


def _of_states(
    name: str, by_token: str, tuning_of: Callable[[int], Any], arguments: tuple[Any, ...]
) -> tuple[str, str]:
    """Describes kernels of states. In fixed order prompts are walked through by token, too."""
    from tandem_kernels.linear_attention.delta_tuning import FIXED

    metadata, *rest = arguments[OF_STATES[name] :]
    decodes, requests = metadata.num_decodes, len(metadata.seq_lens)
    fields = "values", "num_warps"
    if rest and rest[0]:
        return by_token, _fields(FIXED, *fields)
    kernels = [by_token] * (decodes > 0) + ["chunk kernels"] * (decodes < requests)
    return "; ".join(kernels), _fields(tuning_of(decodes), *fields) if decodes else ""


def _few_rows(x: Tensor, weight: Tensor, *rest: Any) -> tuple[str, str]:
    from tandem_kernels.gemm.few_row_gemm import few_row_tuning

    tuning = few_row_tuning(x.device, len(x), *weight.shape)
    return "few_row_gemm_kernel", _fields(tuning, "cols", "depth", "num_warps", "num_stages")


def _small_m(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(*arguments: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.small_m_gemm import small_m_tuning

        fields = "cols", "depth", "num_warps", "num_stages"
        return "small_m_gemm_kernel", _fields(small_m_tuning(arguments[0].device, gated), *fields)

    return of


def _fp8(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, scales: Tensor, weight: Tensor, w_scales: Tensor, *rest: Any) -> Any:
        from tandem_kernels.gemm.fp8_few_rows import few_fp8_tuning
        from tandem_kernels.gemm.fp8_paths import FEW_BLOCK_ROWS, fp8_path
        from tandem_kernels.gemm.fp8_tuning import fp8_tuning

        path = fp8_path(len(x), weight, w_scales)
        if path != "small":
            return "library FP8 GEMM", f"path {path}"
        size, blocks = (len(weight), weight.shape[1]), w_scales.dim() == 2
        if blocks and len(x) <= FEW_BLOCK_ROWS:
            few = few_fp8_tuning(x.device, len(x), *size)
            return "fp8_few_row_kernel", _fields(few, "cols", "depth", "num_warps")
        size = (size[0] // (1 + gated), size[1])
        tuning = fp8_tuning(x.device, len(x), *size, gated=gated, blocks=blocks)
        return "fp8_small_m_kernel", _fields(tuning, *_OF_WEIGHTS)

    return of


_OF_WEIGHTS = "cols", "depth", "splits", "num_warps", "num_stages"
"""Fields of kernels whose programs may share the inner dimension."""


def _int4(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, packed: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.int4_tuning import FIXED, int4_tuning

        size = len(packed) // (1 + gated), x.shape[1]
        is_fixed = any(one is True for one in rest)
        tuning = FIXED if is_fixed else int4_tuning(x.device, len(x), *size, gated=gated)
        return "int4_gemm_kernel", _fields(tuning, "rows", "cols", *_OF_WEIGHTS[2:])

    return of


def _fp4(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, tiles: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.fp4_tiles import SIDE
        from tandem_kernels.gemm.fp4_tuning import FIXED, fp4_tuning

        size = len(tiles) * SIDE // (1 + gated), x.shape[1]
        is_fixed = any(one is True for one in rest)
        tuning = FIXED if is_fixed else fp4_tuning(x.device, len(x), *size, gated=gated)
        return "fp4_gemm_kernel", _fields(tuning, "rows", *_OF_WEIGHTS)

    return of


def _int8(gated: bool) -> Callable[..., tuple[str, str]]:
    def of(x: Tensor, scales: Tensor, weight: Tensor, *rest: Any) -> tuple[str, str]:
        from tandem_kernels.gemm.fp8_tuning import fp8_tuning
        from tandem_kernels.gemm.int8_gemm import int8_tuning, is_small

        if is_small(len(x), weight):
            size = len(weight) // (1 + gated), weight.shape[1]
            few = fp8_tuning(x.device, len(x), *size, gated=gated, blocks=False)
            return "fp8_small_m_kernel", _fields(few, *_OF_WEIGHTS)
        tuning = int8_tuning(x.device, len(x), len(weight))
        sizes = "rows", "cols", "depth", "num_warps", "num_stages"
        return "int8_gemm_kernel", _fields(tuning, *sizes)

    return of


def _plain_experts(
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


def _experts_beside(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weights: Tensor,
    experts: Tensor,
    shared_w13: Tensor,
    shared_w2: Tensor,
    gate: Any = None,
    ranks: int = 1,
) -> tuple[str, str]:
    from tandem_kernels.experts.one_row_experts import SharedWeights

    beside = f"; a shared expert of width {shared_w2.shape[1]} in the first programs"
    if tiles := _one_row(x, w13, w2, SharedWeights(shared_w13, shared_w2)):
        return "one_row_expert_kernel", tiles + beside
    kernels, tiles = _plain_experts(x, w13, w2, weights, experts, ranks=ranks)
    return kernels, tiles + beside


def _one_row(x: Tensor, w13: Tensor, w2: Tensor, shared: Any) -> str:
    """Returns the tiles of one token's experts; nothing if these do not compute them."""
    from tandem_kernels.experts.one_row_experts import one_row_tuning, takes_one_row

    if not takes_one_row(x, w13, w2, shared):
        return ""
    both = one_row_tuning(w13.shape[1] // w2.shape[2], w13.shape[2]), one_row_tuning(1, w2.shape[2])
    tiles = [_fields(each, "cols", "depth", "num_warps") for each in both]
    return f"gate·up {tiles[0]}; down {tiles[1]}"


def _fp8_experts(x: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, weights: Tensor,
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


def _fp4_experts(x: Tensor, w13: Tensor, w2: Tensor, width: int, weights: Tensor,
                 experts: Tensor, fixed: bool = False, b13: Any = None, b2: Any = None,
                 gate: Any = None, summed: bool = True, f13: Any = None, f2: Any = None,
                 ranks: int = 1) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.experts.fp4 import experts as fp4_experts
    from tandem_kernels.experts.fp4.ahead_shapes import HEIGHT, multiplies_ahead
    from tandem_kernels.experts.fp4.pair_shapes import format_of

    given = x, w13, width, experts.numel()
    if not fixed and multiplies_ahead(*given, biased=b13 is not None or b2 is not None, gate=gate):
        return "fp4_experts_ahead_kernel", f"at most {HEIGHT} rows, warps 8"
    shape = ExpertShape(len(w2), width, x.shape[1], format_of(w13))
    own = experts.numel() / ranks
    tunings = _Tunings(shape, x, own, fp4_experts.FIXED if fixed else None)
    return "fp4_experts kernels", str(tunings)


def _fp4_routed(x: Tensor, logits: Tensor, slots: Tensor, residual: Tensor, w13: Tensor,
                w2: Tensor, width: int, top_k: int, **rest: Any) -> tuple[str, str]:  # fmt: skip
    from tandem_kernels.experts.fp4.pair_shapes import format_of

    shape = ExpertShape(len(w2), width, x.shape[1], format_of(w13))
    return "fp4_pair_kernel, choice in the first", str(_Tunings(shape, x, len(x) * top_k))


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

    def _described(self, tunings: Iterable[ExpertTuning]) -> str:
        first, second = map(_tile, tunings)
        return f"gate·up {first}; down {second}; {self._source}"


def _rows_of(found: Range) -> str:
    return "any rows" if found.up_to is None else f"up to {found.up_to:g} rows an expert"


def _tile(tuning: ExpertTuning) -> str:
    sizes = f"{tuning.rows} x {tuning.cols} x {tuning.depth}"
    shared = f", {tuning.runs} even runs an SM" if tuning.runs else ""
    way = ", each pair by itself" if tuning.each_pair else shared
    return f"{sizes}, warps {tuning.num_warps}, stages {tuning.num_stages}{way}"


_KNOWN: dict[str, Callable[..., tuple[str, str]]] = {
    "paged_attention": _paged,
    "latent_attention": _latent,
    "sparse_latent_attention": _sparse_latents,
    "window_rows_attention": _window_rows,
    "window_rows_fp8": _window_rows,
    "block_sparse_attention": _of_blocks,
    "choose_blocks": lambda *_: ("block_scores_kernel, choose_blocks_kernel", ""),
    "index_topk": _index,
    "gated_delta_rule": _delta,
    "mamba_scan": _mamba,
    "few_row_gemm": _few_rows,
    "few_row_conv": lambda *given: ("few_row_conv_kernel", _few_rows(*given)[1]),
    "small_m_gemm": _small_m(gated=False),
    "small_m_gate_up": _small_m(gated=True),
    "fp8_gemm": _fp8(gated=False),
    "fp8_gate_up": _fp8(gated=True),
    "fp8_group_gemm": _fp8(gated=False),
    "int4_gemm": _int4(gated=False),
    "int4_gate_up": _int4(gated=True),
    "fp4_gemm": _fp4(gated=False),
    "fp4_gate_up": _fp4(gated=True),
    "int8_gemm": _int8(gated=False),
    "int8_gate_up": _int8(gated=True),
    "fused_experts": _plain_experts,
    "experts_beside": _experts_beside,
    "fp8_experts": _fp8_experts,
    "fp4_experts": _fp4_experts,
    "fp4_routed_experts": _fp4_routed,
}
