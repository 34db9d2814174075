"""The interface of attention backends: whose kernels attend, and what they want of a step.

    1. `prepare`      once, before the first request: what takes long the first time
    2. `order`        each step, on the host: how prefill chunks lie behind each other
    3. `graph_ok`     whether a recorded step computes this one as well
    4. `metadata`     once a step and KV group: what all layers of the group share
    5. `attend`       once a layer

Batch and runner know no more than this. A backend may give `metadata` of a class of its own: only
its own `attend` reads it, apart from the fields of `AttentionMetadata`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.attention.kv_scales import KVScales

Int32Array: TypeAlias = npt.NDArray[np.int32]


class PrefillChunk(NamedTuple):
    """`num_tokens` tokens of the request in `row`, behind `num_computed` that have their KV."""

    row: int
    num_tokens: int
    num_computed: int


class StepOrder(Protocol):
    """The host's view of R requests, by position in the batch; the decodes come first."""

    @property
    def query_lens(self) -> Int32Array:
        """Returns the tokens that the step computes: [R]."""
        ...

    @property
    def seq_lens(self) -> Int32Array:
        """Returns the context lengths with this step's tokens: [R]."""
        ...

    @property
    def num_decodes(self) -> int: ...
    @property
    def decode_query_len(self) -> int:
        """Returns the number of tokens that each decode computes."""
        ...

    @property
    def is_recorded(self) -> bool:
        """Returns whether a graph is made of the step, which is replayed with other lengths."""
        ...

    @property
    def hides_decodes(self) -> bool:
        """Returns whether requests of a recorded step decode of which only the device knows."""
        ...


class StepBatch(Protocol):
    """The same step on the device, for the layers of one KV group."""

    @property
    def order(self) -> StepOrder: ...
    @property
    def block_tables(self) -> Tensor:
        """Returns the block tables: [R, max_blocks] int32."""
        ...

    @property
    def window(self) -> int | None:
        """Positions that a token sees at most; None: all."""
        ...

    @property
    def query_start_loc(self) -> Tensor:
        """Returns the first query token of each request: [R + 1] int32."""
        ...

    @property
    def seq_lens(self) -> Tensor:
        """Returns the context lengths: [R] int32."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Describes one layer to its backend.

    Attributes:
        num_heads, num_kv_heads: Of this rank.
        head_dim: Numbers of a query and of a key.
        scale: Factor of the scores.
        softcap: Bound of the scores, `softcap * tanh(score / softcap)`; 0: none.
        sinks: [num_heads] float32 or None: scores without a value, which the softmax counts.
        kv_scales: Of an FP8 cache; None: the cache is in the dtype of keys and values.
        v_head_dim: Numbers of a value; 0: as many as of a key.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = field(default=None, compare=False)
    kv_scales: KVScales | None = field(default=None, compare=False)
    v_head_dim: int = 0

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def query_width(self) -> int:
        """Returns the numbers of all queries of a token, which come first among its heads."""
        return self.num_heads * self.head_dim

    def queries(self, heads: Tensor) -> Tensor:
        """Returns [T, Hq, D] of `AttentionBackend.attend`'s heads."""
        return heads[:, : self.query_width].view(len(heads), self.num_heads, self.head_dim)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [T, Hq, D], keys [T, Hkv, D] and values [T, Hkv, Dv] of
        `AttentionBackend.attend`'s heads."""
        count, width = self.num_kv_heads, self.value_dim
        sizes = [self.query_width, count * self.head_dim, count * width]
        q, k, v = torch.split(heads, sizes, dim=1)
        return (
            q.view(len(q), self.num_heads, self.head_dim),
            k.view(len(k), count, self.head_dim),
            v.view(len(v), count, width),
        )


@dataclass(frozen=True, slots=True)
class WholeImage:
    """One image of a step whose tokens see each other.

    Attributes:
        request: Its place in the batch.
        rows: Its query tokens in the step, up to its last.
        offset, end: Where it is in its prompt.
        in_windows: They do so in layers with a window alone.
    """

    request: int
    rows: slice
    offset: int
    end: int
    in_windows: bool = False


class AttentionBackend(ABC):
    """Owns the order of chunks, the metadata and the kernels of attention."""

    def prepare(  # noqa: B027
        self, num_heads: int, kv_cache: PagedKV, dtype: torch.dtype, max_tokens: int
    ) -> None:
        """Does what takes long the first time, for prompts of up to `max_tokens` tokens.

        Args:
            num_heads: Query heads of this rank.
            kv_cache: [N, 2, Hkv, B, D] of a layer that sees everything, or its pages.
            dtype: Of queries, keys and values, before they are in the cache.
        """

    @property
    def expands_contexts(self) -> bool:
        """Returns whether a step takes more memory behind a long cached context."""
        return False

    def order(self, chunks: list[PrefillChunk]) -> list[PrefillChunk]:
        """Returns the same chunks as they shall lie behind each other."""
        return chunks

    def graph_ok(self, order: StepOrder) -> bool:
        """Returns whether a graph that was recorded with this backend may compute the step."""
        return True

    @abstractmethod
    def metadata(self, batch: StepBatch) -> AttentionMetadata:
        """Returns what all layers of a KV group share in a step."""

    def reads_new_keys(self, metadata: AttentionMetadata) -> bool:
        """Returns whether `attend` reads this step's keys and values from `heads` and not from the
        cache."""
        return False

    @abstractmethod
    def attend(
        self, spec: AttentionSpec, heads: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> Tensor:
        """Attends, once the step's keys and values are in the cache.

        Args:
            heads: [T, Hq D + Hkv (D + Dv)], queries, rotated, keys and values. Where it does not
                read new keys (`reads_new_keys`), keys and values may be anything.
            kv_cache: [N, 2, Hkv, B, D], or its pages.

        Returns:
            [T, Hq, Dv].
        """
