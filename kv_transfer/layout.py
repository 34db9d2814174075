"""The geometry of a KV cache: the one place that knows how KV lies in memory.

Layers that are cached alike form a group. What a layer keeps of each token is a list of planes:

    Llama                 one group, planes k and v
    latent attention      one group, one plane that every rank has whole
    window + full         two groups, each with a block table of its own; heads may differ, too
    linear attention      one block a request, whose pages hold one state of all tokens so far
    compressed rows       a row for every 4 or 128 tokens (DeepSeek V4); beside it a group of the
                          tokens of the row that is still open, and one of a window: the layer
                          is in all three

Memory of a rank. All groups share one pool of block ids and one page size, and a block belongs to
one group at a time. Layer i of a group lies in slot i, so slots are shared as well. Groups whose
rows differ in size have blocks of as many tokens as fill the page best:

    slot 0   | page of block 0 | page of block 1 | ...    page_bytes each
    slot 1   | page of block 0 | page of block 1 | ...
             num_slots = the most layers that a group has

    page     | plane 0 [heads, block_size, row_bytes] | plane 1 | ... | unused |

A group that takes little may lie in slots that another one leaves unused, in the blocks of that one
and as many tokens of it. Several of its layers share a slot:

    slot 21  | pages of layers 0, 1, 2, 3 of the group, in block 0 | unused | of block 1 | ...

For one group with planes k and v a slot is `[num_blocks, 2, heads, block_size, head_dim]`.

Heads are numbered over all ranks of a node, so nodes with different tensor-parallel sizes agree on
ranges of heads; tokens are numbered from the start of the prompt, so different block sizes agree
on ranges of tokens. The order of a group's layers is that of the model's forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from kv_transfer.errors import HandshakeMismatch
from kv_transfer.planes import NO_HEADS, HeadRange, PageShape, Plane, PlaneShape

PROTOCOL_VERSION = 2
"""Raised when a node of the version before would misread a message. 2: groups and planes."""

MAX_BLOCK_SIZE = 1 << 14
"""Rows. More is no block of a peer, but a mistake that would cost memory."""

STATE_SPAN = 1 << 30
"""The `block_size` of a group whose layers keep no row for each token but one state of all tokens
so far: more tokens than any sequence has, so a request has one block, with one row."""

FP8 = "float8_e4m3fn"
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, FP8: 1}

MAX_TP_SIZE = 1024
"""A peer that claims more is refused: what is computed for each of its ranks must be bounded."""

T = TypeVar("T")

BlockIds: TypeAlias = tuple[list[int], ...]
"""One list a group: physical blocks by logical index. Entries before the first block that a
window still needs are never read."""


class KVGroup(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Layers that are cached alike and share a block table.

    Attributes:
        layers: Numbers of these layers in the model, ascending.
        block_size: Tokens in one block. Nodes may differ in it. `STATE_SPAN`: it holds a state.
        dtype: Of the numbers in the planes; those of a state may differ from it.
        window: A token sees itself and the `window - 1` before it; None: all before it.
        scales: Of quantised numbers; equal texts stand for equal scales. Empty: they have none.
        compress_ratio: Tokens that a row stands for. It is there once it has all of them; blocks
            are multiples of it.
        window_align: The window reaches back to a multiple of this many tokens: with 128 and a
            window of 1, to the first of the 128 that a row will stand for.
        blocks_of: The group in whose blocks it lies; -1: it has blocks of its own, as all groups
            have that stand before it.
    """

    layers: tuple[int, ...]
    planes: tuple[Plane, ...]
    block_size: int
    dtype: str
    window: int | None = None
    scales: str = ""
    compress_ratio: int = 1
    window_align: int = 1
    blocks_of: int = -1

    @property
    def is_state(self) -> bool:
        """Returns whether a block holds one state, right for the token behind those that it has
        taken in and for no other."""
        return self.block_size == STATE_SPAN

    @property
    def number_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def rows_per_block(self) -> int:
        return 1 if self.is_state else self.block_size // self.compress_ratio

    @property
    def is_open(self) -> bool:
        """Returns whether it keeps what rows of another group are still to be made of."""
        return self.window_align > 1

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns how many blocks `num_tokens` tokens reach into."""
        return -(-num_tokens // self.block_size)

    def first_token_seen(self, num_tokens: int) -> int:
        """Returns the first token that token `num_tokens`, the next one, still sees. The state that
        it sees is that behind the last one."""
        if self.is_state:
            return max(0, num_tokens - 1)
        if self.window is None:
            return 0
        first = max(0, num_tokens - self.window + 1)
        return first - first % self.window_align

    def first_block_seen(self, num_tokens: int) -> int:
        """Returns the first block that any token after `num_tokens` tokens still needs."""
        return self.first_token_seen(num_tokens) // self.block_size

    def tokens_to_pull(self, first_token: int, num_tokens: int) -> range:
        """Returns which tokens of a prompt of `num_tokens` a node must pull that has the first
        `first_token` and computes none of it: those that a window still needs."""
        return range(max(first_token, self.first_token_seen(num_tokens)), num_tokens)

    def rows_to_pull(self, first_token: int, num_tokens: int) -> range:
        """Returns the same as rows, counted through the request's blocks: those that have all of
        their tokens."""
        tokens = self.tokens_to_pull(first_token, num_tokens)
        if self.is_state:
            return range(min(1, len(tokens)))
        return range(tokens.start // self.compress_ratio, tokens.stop // self.compress_ratio)

    def blocks_to_pull(self, first_token: int, num_tokens: int) -> range:
        """Returns the blocks that have any of these rows. Where they stop follows from the prompt
        alone."""
        rows, size = self.rows_to_pull(first_token, num_tokens), self.rows_per_block
        num_rows = 1 if self.is_state else num_tokens // self.compress_ratio
        stop = -(-num_rows // size)
        return range(rows.start // size if rows else stop, stop)

    def page(self, heads: Sequence[HeadRange]) -> PageShape:
        """Returns a page with these heads of each plane."""
        shapes: list[PlaneShape] = []
        offset = 0
        for plane, held in zip(self.planes, heads, strict=True):
            shapes.append(PlaneShape(held, plane.row_bytes, self.rows_per_block, offset))
            offset += shapes[-1].num_bytes
        return PageShape(self.rows_per_block, tuple(shapes))

    def page_of_rank(self, rank: int, tp_size: int) -> PageShape:
        """Returns a page as `rank` of `tp_size` stores it."""
        return self.page([plane.heads_of_rank(rank, tp_size) for plane in self.planes])

    def bytes_needed(self, tp_size: int) -> int:
        """Returns the bytes of a page that any rank uses; all use equally many."""
        return self.page_of_rank(0, tp_size).num_bytes


class PagePlaces(NamedTuple):
    """Says where a group's pages lie in a block: those of its first `layers_a_slot` layers behind
    each other in slot `first_slot`, from its beginning on, those of the next ones behind it."""

    first_slot: int
    layers_a_slot: int
    page_bytes: int

    def place_of(self, layer: int) -> tuple[int, int]:
        """Returns the slot of a layer of the group, and where its page begins there."""
        slot, place = divmod(layer, self.layers_a_slot)
        return self.first_slot + slot, place * self.page_bytes


def own_groups(groups: Sequence[KVGroup]) -> tuple[KVGroup, ...]:
    """Returns the groups that have blocks of their own: the first ones."""
    return tuple(group for group in groups if group.blocks_of < 0)


def of_every_group(groups: Sequence[KVGroup], own: Sequence[T]) -> tuple[T, ...]:
    """Returns what each group has, such as a table of blocks, from what those have that have blocks
    of their own."""
    return (*own, *(own[group.blocks_of] for group in groups if group.blocks_of >= 0))


class KVLayout(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """All that a node says of its KV cache."""

    groups: tuple[KVGroup, ...]
    tp_size: int
    model_hash: str
    protocol_version: int = PROTOCOL_VERSION
    num_draft_layers: int = 0
    """The last this many layers are those of a drafter."""
    draft_hash: str = ""
    """Is equal for nodes whose drafters keep the same KV; empty: there is none that keeps any."""
    stage_starts: tuple[int, ...] = ()
    """The first layer of each pipeline stage; empty: every rank has all layers. Ranks are numbered
    stage by stage."""

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one block in one slot of one rank."""
        return max(group.bytes_needed(self.tp_size) for group in own_groups(self.groups))

    @property
    def num_slots(self) -> int:
        """Pages that a block has on a rank with most: as many as the largest group has layers."""
        stages, groups = range(self.num_stages), own_groups(self.groups)
        return max(len(self.layers_on(stage, group)) for stage in stages for group in groups)

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of one block of one rank, over all slots."""
        return self.num_slots * self.page_bytes

    @property
    def num_layers(self) -> int:
        """Returns how many layers the model has."""
        return 1 + max(group.layers[-1] for group in self.groups if group.layers)

    @property
    def num_stages(self) -> int:
        return max(1, len(self.stage_starts))

    @property
    def num_ranks(self) -> int:
        return self.num_stages * self.tp_size

    def groups_of(self, layer: int) -> tuple[int, ...]:
        """Returns the groups that a layer is in."""
        return tuple(index for index, group in enumerate(self.groups) if layer in group.layers)

    def layers_on(self, stage: int, group: KVGroup) -> tuple[int, ...]:
        """Returns the layers of a group that a stage has, counted from the stage's first."""
        if not self.stage_starts:
            return group.layers
        start, *more = *self.stage_starts[stage:], self.num_layers
        return tuple(layer - start for layer in group.layers if start <= layer < more[0])

    def of_rank(self, rank: int) -> KVLayout:
        """Returns the layout of what one rank has, as if the layers of its stage were a model."""
        return _of_stage(self, rank // self.tp_size) if self.stage_starts else self

    def first_layer_on(self, rank: int) -> int:
        """Returns the number of the first layer that a rank has."""
        return self.stage_starts[rank // self.tp_size] if self.stage_starts else 0

    @property
    def num_model_layers(self) -> int:
        """Returns how many layers the model has without a drafter's."""
        return self.num_layers - self.num_draft_layers

    def has_same_drafts(self, peer: KVLayout) -> bool:
        """Returns whether KV of the drafter's layers means the same on both nodes."""
        return self.draft_hash == peer.draft_hash

    def num_shared_layers(self, group: int, peer: KVLayout) -> int:
        """Returns how many layers of a group, from its first on, mean the same on both nodes."""
        layers = self.groups[group].layers
        if self.has_same_drafts(peer):
            return len(layers)
        return sum(layer < self.num_model_layers for layer in layers)

    def page(self, group: int, rank: int) -> PageShape:
        """Returns a page of a group as `rank` stores it."""
        return self.groups[group].page_of_rank(rank % self.tp_size, self.tp_size)

    def places(self, group: int) -> PagePlaces:
        """Returns where a group's pages lie in a block of a rank that has all layers."""
        own = self.groups[group]
        if own.blocks_of < 0:
            return PagePlaces(0, 1, self.page_bytes)
        size = own.bytes_needed(self.tp_size)
        return PagePlaces(len(self.groups[own.blocks_of].layers), self.page_bytes // size, size)

    def share(self, rank: int, puller: int, puller_tp_size: int) -> tuple[PageShape, ...]:
        """Returns what a block of our `rank` looks like on its way to rank `puller` of a node with
        `puller_tp_size` ranks, by group: only with the heads that it takes from this rank."""
        return _share(self, rank % self.tp_size, puller, puller_tp_size)

    def num_pullers(self, rank: int, puller_tp_size: int) -> tuple[int, ...]:
        """Returns how many ranks of a node with `puller_tp_size` ranks take anything from our
        `rank`, by group."""
        shares = [self.share(rank, puller, puller_tp_size) for puller in range(puller_tp_size)]
        return tuple(
            sum(page.num_bytes > 0 for page in pages) for pages in zip(*shares, strict=True)
        )

    def num_blocks_for(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the blocks that `num_tokens` tokens reach into, by group."""
        return tuple(group.num_blocks_for(num_tokens) for group in self.groups)

    def check_compatible(self, peer: KVLayout) -> None:
        """Raises `HandshakeMismatch` naming the first field that must agree and does not. The
        protocol comes first: what another version says of the rest means something else."""
        _check_equal("protocol_version", self.protocol_version, peer.protocol_version)
        _check_equal("model_hash", self.model_hash, peer.model_hash)
        _check_equal("len(groups)", len(self.groups), len(peer.groups))
        for index, (ours, theirs) in enumerate(zip(self.groups, peer.groups, strict=True)):
            # Nodes may differ in their drafters: what only one of them has is left aside.
            name = f"groups[{index}]"
            _check_equal(f"{name}.layers", *(one._model_layers(index) for one in (self, peer)))
            _check_group(name, ours, theirs)
            _check_places(name, ours, peer, index)
        starts = peer.stage_starts
        if starts and (starts[0] or not _rise((*starts, peer.num_layers))):
            raise HandshakeMismatch("stage_starts", self.stage_starts, starts)
        if not self.can_be_split(peer.tp_size):
            raise HandshakeMismatch("tp_size", self.tp_size, peer.tp_size)

    def _model_layers(self, group: int) -> tuple[int, ...]:
        layers = self.groups[group].layers
        return tuple(layer for layer in layers if layer < self.num_model_layers)

    def can_be_split(self, tp_size: int) -> bool:
        """Returns whether each head has a rank in a node with this many ranks."""
        return 1 <= tp_size <= MAX_TP_SIZE and all(
            plane.can_be_split(tp_size) for group in self.groups for plane in group.planes
        )


@lru_cache(maxsize=1024)
def _share(holder: KVLayout, rank: int, puller: int, puller_tp_size: int) -> tuple[PageShape, ...]:
    """Asked for by every call of every transfer, and nearly always the same."""
    return tuple(
        group.page(
            [
                dict(plane.sources(puller, puller_tp_size, holder.tp_size)).get(rank, NO_HEADS)
                for plane in group.planes
            ]
        )
        for group in holder.groups
    )


@lru_cache(maxsize=1024)
def _of_stage(layout: KVLayout, stage: int) -> KVLayout:
    groups = tuple(
        msgspec.structs.replace(group, layers=layout.layers_on(stage, group))
        for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups, stage_starts=())


def attention_group(
    *, layers: Sequence[int], heads: int, head_dim: int, dtype: str, block_size: int,
    window: int | None = None, v_head_dim: int | None = None,
) -> KVGroup:  # fmt: skip
    """Returns a group with planes k and v; values are as wide as keys, or `v_head_dim`."""
    k, v = (width * DTYPE_BYTES[dtype] for width in (head_dim, v_head_dim or head_dim))
    return KVGroup(
        layers=tuple(layers),
        planes=(Plane("k", heads, k), Plane("v", heads, v)),
        block_size=block_size,
        dtype=dtype,
        window=window,
    )


def _rise(numbers: Sequence[int]) -> bool:
    return all(first < second for first, second in pairwise(numbers))


def _check_equal(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise HandshakeMismatch(field, ours, theirs)


def _check_places(name: str, ours: KVGroup, peer: KVLayout, index: int) -> None:
    """Raises `HandshakeMismatch` where pages would lie outside of a peer's blocks."""
    theirs = peer.groups[index]
    if theirs.blocks_of < 0:
        if any(group.blocks_of >= 0 for group in peer.groups[:index]):
            raise HandshakeMismatch(f"{name}.blocks_of", ours.blocks_of, theirs.blocks_of)
        return
    own = own_groups(peer.groups)
    fits = theirs.blocks_of < len(own) and not peer.stage_starts
    fits = fits and theirs.block_size == own[theirs.blocks_of].block_size
    size = theirs.bytes_needed(peer.tp_size)
    if fits and 0 < size <= peer.page_bytes:
        slot, _ = peer.places(index).place_of(len(theirs.layers) - 1)
        fits = slot < peer.num_slots
    else:
        fits = False
    if not fits:
        raise HandshakeMismatch(f"{name}.blocks_of", ours.blocks_of, theirs.blocks_of)


def _check_group(name: str, ours: KVGroup, theirs: KVGroup) -> None:
    for field in ("dtype", "scales", "window", "window_align", "compress_ratio", "is_state"):
        _check_equal(f"{name}.{field}", getattr(ours, field), getattr(theirs, field))
    _check_equal(f"len({name}.planes)", len(ours.planes), len(theirs.planes))
    for index, (plane, other) in enumerate(zip(ours.planes, theirs.planes, strict=True)):
        for field in ("name", "heads", "row_bytes", "replicated"):
            _check_equal(
                f"{name}.planes[{index}].{field}", getattr(plane, field), getattr(other, field)
            )
    fits = 1 <= theirs.block_size <= MAX_BLOCK_SIZE * theirs.compress_ratio
    if not (ours.is_state or (fits and theirs.block_size % theirs.compress_ratio == 0)):
        raise HandshakeMismatch(f"{name}.block_size", ours.block_size, theirs.block_size)
