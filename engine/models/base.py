"""The contract between the engine and a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from engine.layers.attention.backend import AttentionBackend, WholeImage
from engine.layers.attention.layer import ChosenTokens
from engine.layers.residual import ResidualStream
from engine.layers.shard import CheckpointWeight
from engine.layers.vocabulary.vocab_part import VocabCut, VocabPart
from engine.models.weights.stacked_experts import StackableExperts
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.index_pages import LayerCache
from tandem_kernels.batch.state_metadata import StateMetadata


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """One pass of T tokens, for the layers of one KV group.

    Attributes:
        slot_mapping: [T] int64, block * B + offset; -1: nowhere.
        metadata: The ragged batch, as the backend made it, or as layers with a state take it.
        kept: See `AttentionInputs`.
    """

    slot_mapping: Tensor
    metadata: AttentionMetadata | StateMetadata
    kept: AttentionMetadata | None = None


@dataclass(frozen=True, slots=True)
class Taps:
    """Asks for the residual stream in front of some layers.

    Attributes:
        layers: Numbers of these layers, ascending; the number behind the last one asks for what all
            layers have made.
        streams: [T, H] of each of them, once the pass is done; [T, n H] of n streams.
    """

    layers: tuple[int, ...]
    streams: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Holds what a pass needs for tokens of images.

    Attributes:
        positions: [3, T] int64: time, row and column of each token; None: those of text.
        places: [n] int64, which tokens of the pass are of images.
        embeddings: [1 + taps, n, H]: what they begin with, and what is added to the stream behind
            each of the first layers. None, like `places`: the pass is among images and has none.
        wholes: Images of the pass whose tokens see each other.
    """

    positions: Tensor | None = None
    places: Tensor | None = None
    embeddings: Tensor | None = None
    wholes: tuple[WholeImage, ...] = ()

    def begin(self, stream: ResidualStream, input_ids: Tensor) -> Tensor:
        """Puts the embeddings of images where those of placeholders are. Returns the tokens [T],
        those of images as padding: a layer that reads embeddings of its own has none of them."""
        if self.places is None or self.embeddings is None:
            return input_ids
        stream.sum.index_copy_(0, self.places, self.embeddings[0])
        return input_ids.index_fill(0, self.places, _PADDING)

    def follow(self, stream: ResidualStream, layer: int) -> None:
        """Adds what the tower has for behind `layer`, if it has any."""
        if self.places is None or self.embeddings is None or layer + 1 >= len(self.embeddings):
            return
        stream.add_to_rows(self.places, self.embeddings[layer + 1])


_PADDING = 0
"""Gemma's padding token."""


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """One pass of T tokens.

    Attributes:
        input_ids: [T] int32.
        positions: [T] int64.
        groups: By KV group of the model's layout.
        kv_caches: Of each layer, [N, 2, Hkv, B, D], or as `layer_views` of
            `engine.worker.memory.kv_cache` has it.
        backend: Whose kernels attend.
        on_layer: Called with the index of each layer when its keys and values are in the cache.
        taps: Filled during the pass; None: nothing asks.
        images: None: no token of the pass is of an image, nor of a prompt that is still among
            images.
        choice: What sparse layers attend to, of a drafter's pass before; None: they choose.
        kept: [n], the tokens whose hidden states are asked for, in this order: behind its attention
            the last layer leaves the others out. None: all. Only of a model that `keeps_rows`.
    """

    input_ids: Tensor
    positions: Tensor
    groups: tuple[GroupInputs, ...]
    kv_caches: list[LayerCache]
    backend: AttentionBackend
    on_layer: Callable[[int], None]
    taps: Taps | None = None
    images: ImageInputs | None = None
    kept: Tensor | None = None
    choice: ChosenTokens | None = None

    def tap(self, layer: int, stream: ResidualStream) -> None:
        """Keeps the stream in front of a layer, if `taps` ask for that."""
        if self.taps is not None and layer in self.taps.layers:
            self.taps.streams.append(stream.value())


class CausalLM(nn.Module):
    """One rank's share of a model, as runner and loader use it.

    Built with `(config, spec, shard)`: of the engine, of the architecture, of this rank.
    """

    keeps_rows: bool = False
    """Whether a pass may ask for hidden states of some tokens alone."""

    @abstractmethod
    def forward(self, step: ForwardInputs) -> Tensor:
        """Computes [T] int64 token ids -> hidden states [T, H], or of the tokens that are kept,
        after the last norm. A stage of a pipeline computes its layers of what the one before sends,
        and sends it on."""

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Returns what the first layer reads of [T] token ids, [T, H]: drafters begin with it."""
        raise NotImplementedError(f"{type(self).__name__} has no embedding for drafters")

    @abstractmethod
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Computes [S, H] -> float32 [S, vocabulary], the same on every rank."""

    @property
    def vocab_cut(self) -> VocabCut | None:
        """Returns how logits are cut that `compute_choices` leaves where they are; None: it leaves
        none."""
        return None

    def compute_choices(self, hidden: Tensor) -> Tensor | VocabPart:
        """Does what `compute_logits` does, [S, H] -> [S, vocabulary], for a sampler that gathers
        logits where it must."""
        return self.compute_logits(hidden)

    @abstractmethod
    def checkpoint_weights(self) -> Iterator[CheckpointWeight]:
        """Yields every tensor that the checkpoint must have, and where it goes."""

    @property
    def stackable_experts(self) -> StackableExperts | None:
        """Returns the experts that a checkpoint may have in one tensor a layer; see
        `engine.models.weights.stacked_experts`."""
        return None

    @property
    def elsewhere(self) -> frozenset[str]:
        """Returns beginnings of names of tensors that other stages of the pipeline read."""
        return frozenset()

    @property
    def unused_weights(self) -> frozenset[str]:
        """Returns names of tensors that a checkpoint may have and this model does not read; one
        that ends with a dot stands for all that begin with it."""
        return frozenset()
