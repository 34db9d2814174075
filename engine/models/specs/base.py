"""The torch-free side of an architecture: what its config.json means, and what it refuses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Self

import msgspec

from engine.config import KVLayers, ModelConfig, ParallelConfig
from engine.head_sizes import HeadSizes
from engine.models.config.config_file import ConfigFile
from engine.models.specs.indexer import BlockIndexerSpec, IndexerSpec
from engine.models.specs.latent import LatentSpec
from engine.models.specs.token_rows import AltSpec, StreamsSpec, TokenRowsSpec

PLAIN_CHECKPOINT = "use a plain checkpoint of this family, in fp32, fp16 or bf16"


class UnsupportedField(ValueError):
    """config.json asks for something that would be computed wrongly in silence.

    Attributes:
        field: Of config.json.
        what: What it asks for, named for a reader.
        cure: What to do.
    """

    def __init__(self, field: str, what: str, cure: str = PLAIN_CHECKPOINT) -> None:
        super().__init__(f"{field}: {what}")
        self.field = field
        self.what = what
        self.cure = cure


def kind_faults(kinds: Iterable[str] | None, known: set[str]) -> Iterator[UnsupportedField]:
    """Yields what `layer_types` says of layers that are none of the kinds `known`."""
    if unknown := set(kinds or ()) - known:
        yield UnsupportedField("layer_types", ", ".join(sorted(unknown)))


def check_kinds(kinds: Iterable[str] | None, known: set[str]) -> None:
    """Raises `UnsupportedField` for layers that are none of the kinds `known`."""
    for fault in kind_faults(kinds, known):
        raise fault


def of_each_layer(file: ConfigFile, name: str) -> list[Any] | None:
    """Returns what a field says of each layer; None: nothing. Raises `UnsupportedField` where it
    names fewer layers than there are, or more."""
    said: list[Any] | None = getattr(file, name)
    if said and len(said) != file.num_hidden_layers:
        raise UnsupportedField(name, f"{len(said)} kinds for {file.num_hidden_layers} layers")
    return said or None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what only the architecture itself reads of a checkpoint's config.json."""

    renamed_tensors: ClassVar[tuple[tuple[str, str], ...]] = ()
    """These expressions find names of tensors that a checkpoint has otherwise than most, with what
    they stand for, in this order."""

    written_names: ClassVar[tuple[tuple[str, str], ...]] = ()
    """The other way round, for lists of layers that a quantised checkpoint leaves plain: each
    expression finds names of our layers, and what replaces it makes one of the checkpoint's."""

    plain_layers: ClassVar[tuple[str, ...]] = ()
    """Expressions for layers that published checkpoints leave plain, whatever config.json says."""

    @classmethod
    def renamed(cls, file: ConfigFile) -> ConfigFile:
        """Returns config.json with what this family says in fields of its own said in those that
        others have. All else here is given the result. Raises `UnsupportedField`."""
        return file

    @classmethod
    @abstractmethod
    def from_config(cls, file: ConfigFile, max_model_len: int) -> Self:
        """Reads config.json.

        Args:
            max_model_len: Tokens of a sequence at most, as the engine will serve them.

        Raises:
            UnsupportedField: A field asks for what tandem does not have.
        """

    @classmethod
    @abstractmethod
    def head_dim_of(cls, file: ConfigFile) -> int:
        """Returns the size of a head, of most layers where they differ."""

    @classmethod
    def read_heads(cls, file: ConfigFile) -> tuple[HeadSizes, ...]:
        """Returns the heads of each layer; none: they are alike, with values as wide as keys.
        Raises `UnsupportedField`."""
        return ()

    @abstractmethod
    def check_parallel(self, model: ModelConfig, parallel: ParallelConfig) -> None:
        """Raises `CheckpointError` when this many ranks cannot share the model."""

    @property
    def num_experts(self) -> int:
        """Returns how many experts a layer has; 0: none."""
        return 0

    @property
    def num_experts_per_token(self) -> int:
        """Returns how many routed experts a token goes to; 0: there are none."""
        return 0

    def kv_layers(self, model: ModelConfig) -> tuple[KVLayers, ...]:
        """Returns the groups of layers that cache alike; none: all layers keep keys and values of
        the model's KV heads, and see all tokens."""
        return ()

    @property
    def rare_attention(self) -> str:
        """Returns the name of what only our own attention kernels know; empty: nothing."""
        return ""

    @property
    def latent_shape(self) -> LatentSpec | None:
        """Returns the sizes of latent attention; None: heads have keys and values."""
        return None

    def indexer_of(self, layer: int) -> IndexerSpec | None:
        """Returns what chooses the tokens that a layer attends to; None: it attends to all."""
        return None

    def block_indexer_of(self, layer: int) -> BlockIndexerSpec | None:
        """Returns what chooses the blocks that a layer with heads attends to; None: it attends to
        all."""
        return None

    def attends_to_chosen(self, layer: int) -> bool:
        """Returns whether a layer attends to chosen tokens of a context that is longer than
        `dense_tokens`."""
        return self.dense_tokens is not None

    @property
    def drafts_choose_once(self) -> bool:
        """Returns whether a prediction layer's drafts behind its first one attend to what that one
        has chosen."""
        return False

    @property
    def dense_tokens(self) -> int | None:
        """Returns up to how many tokens a context is attended as a whole; None: always."""
        return None

    @property
    def rows_of_tokens(self) -> TokenRowsSpec | None:
        """Returns the sizes of layers with rows that stand for several tokens; None: there are
        none."""
        return None

    @property
    def residual_streams(self) -> StreamsSpec | None:
        """Returns how residual streams are mixed; None: there is one."""
        return None

    @property
    def block_layers(self) -> int:
        """Returns how many layers are a block, of which later ones read a mixture; 0: all add to
        one stream."""
        return 0

    @property
    def alternating_streams(self) -> AltSpec | None:
        """Returns of how many streams layers compute one; None: there is one."""
        return None

    def gate_cutoff(self, layer: int) -> float:
        """Returns how many standard deviations above their mean a layer's gates are kept; 0: all
        are."""
        return 0.0

    @property
    def has_sinks(self) -> bool:
        """Returns whether query heads of any layer have attention sinks."""
        return False

    @abstractmethod
    def hash_facts(self, model: ModelConfig) -> tuple[Any, ...]:
        """Returns everything but the weights that the KV depends on, in a fixed order."""
