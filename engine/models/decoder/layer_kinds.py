"""Says with what each layer looks at other tokens: its KV group, and how it rotates.

Layers that agree in both share their inputs, which are made once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from engine.config import EngineConfig, ModelConfig
from engine.layers.attention.layer import AttentionInputs, ChosenTokens
from engine.layers.attention.row_inputs import GroupPlaces
from engine.layers.rotary import cos_sin_cache, query_scales
from engine.layers.states.parallel_mixer import MixedInputs
from engine.layers.states.state_pages import StateInputs, TokenPlaces
from engine.models.base import ForwardInputs
from engine.models.specs.dense import DenseSpec
from engine.rope import UNROTATED, Rotary
from tandem_kernels import ops
from tandem_kernels.batch.state_metadata import StateMetadata

LayerInputs: TypeAlias = AttentionInputs | StateInputs | MixedInputs


class _Turn(NamedTuple):
    """How the heads of a layer turn."""

    head_dim: int
    rotary: Rotary


def _turn(model: ModelConfig, spec: DenseSpec, layer: int) -> _Turn:
    return _Turn(model.heads_of(layer).head_dim, spec.rotary_of(layer))


def _state_turn(spec: DenseSpec) -> _Turn | None:
    """Returns how the heads of layers with a state turn; None: they do not."""
    turn = None if spec.states is None else spec.states.turn
    return None if turn is None else _Turn(*turn)


class LayerKinds:
    """The kinds of some layers, which are adjacent. Tables of cosines and sines cover
    `max_model_len` positions; most layers that keep a state have none.

    Args:
        first_cached: The layer that the cache numbers as its first.

    Attributes:
        caches: Of each layer, the place among them of the one whose cache it reads.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: DenseSpec,
        layers: Iterable[int],
        device: torch.device,
        first_cached: int = 0,
    ) -> None:
        model, groups = config.model, config.kv_layout.groups
        layout = config.kv_layout
        of_layers = [(i, layout.groups_of(spec.kv_source(i) - first_cached)) for i in layers]
        first = of_layers[0][0] if of_layers else 0
        self.caches = [spec.kv_source(i) - first for i, _ in of_layers]
        kinds = [
            (own, _state_turn(spec) if groups[own[0]].is_state else _turn(model, spec, i))
            for i, own in of_layers
        ]
        self._ratios = [group.compress_ratio for group in groups]
        self._hashes = spec.experts is not None and len(spec.experts.hashed_layers) > 0
        distinct = list(dict.fromkeys(kinds))
        tables = {
            turn: cos_sin_cache(turn.head_dim, model.max_model_len, turn.rotary).to(device)
            for turn in dict.fromkeys(turn for _, turn in distinct)
            if turn is not None
        }
        self._kinds = [(own, None if turn is None else tables[turn]) for own, turn in distinct]
        every = not spec.scales_unrotated
        self._are_scaled = [
            turn is not None and (every or turn.rotary == UNROTATED) for _, turn in distinct
        ]
        self._of_layer = [distinct.index(kind) for kind in kinds]
        self._query_scales: Tensor | None = None
        if spec.query_scale is not None:
            scales = query_scales(model.max_model_len, spec.query_scale)
            self._query_scales = scales.to(device)
        vision = model.vision
        self._axes = None
        if vision is not None and vision.rope_axes:
            self._axes = torch.tensor(vision.rope_axes, device=device)

    def inputs(self, step: ForwardInputs) -> list[LayerInputs]:
        """Returns what each layer is given."""
        scales = None if self._query_scales is None else self._query_scales[step.positions]
        ids = self._token_ids(step)
        of_kind = [
            self._inputs(step, *kind, scales if is_scaled else None, ids)
            for kind, is_scaled in zip(self._kinds, self._are_scaled, strict=True)
        ]
        return [of_kind[kind] for kind in self._of_layer]

    def _inputs(
        self,
        step: ForwardInputs,
        own: tuple[int, ...],
        table: Tensor | None,
        scales: Tensor | None,
        ids: Tensor | None,
    ) -> LayerInputs:
        group = step.groups[own[0]]
        metadata = group.metadata
        if isinstance(metadata, StateMetadata):
            return _state_inputs(step, metadata, table)
        assert table is not None
        positions = step.positions
        images = step.images
        if images is not None and images.positions is not None and self._axes is not None:
            table = _table_of_tokens(table, images.positions, self._axes)
            positions = torch.arange(len(table), device=table.device)
        rest = metadata, step.backend, group.kept, scales
        wholes = () if images is None else images.wholes
        choice = ChosenTokens() if step.choice is None else step.choice
        beside = [step.groups[index].metadata for index in own[1:]]
        states = [one for one in beside if isinstance(one, StateMetadata)]
        others = () if states else tuple(self._places(step, index) for index in own[1:])
        slots = group.slot_mapping
        inputs = AttentionInputs(positions, table, slots, *rest, choice, wholes, others, ids)
        return MixedInputs(inputs, _state_inputs(step, states[0])) if states else inputs

    def _token_ids(self, step: ForwardInputs) -> Tensor | None:
        """Returns those by which experts are chosen, [T] int64; -1: padding. None: none are."""
        if not self._hashes:
            return None
        slots = step.groups[self._kinds[0][0][0]].slot_mapping
        return ops.placed_ids(slots, step.input_ids)

    def _places(self, step: ForwardInputs, index: int) -> GroupPlaces:
        """Returns where a step's tokens are in a group."""
        group, ratio = step.groups[index], self._ratios[index]
        slots, metadata = group.slot_mapping, group.metadata
        assert not isinstance(metadata, StateMetadata)
        return GroupPlaces(slots if ratio == 1 else ops.closed_slots(slots, ratio), metadata)


def _state_inputs(
    step: ForwardInputs, metadata: StateMetadata, table: Tensor | None = None
) -> StateInputs:
    # A state has no slots: any group of tokens tells what is padding.
    places = None if table is None else TokenPlaces(step.positions, table)
    return StateInputs(step.groups[0].slot_mapping, metadata, places)


def routed_slots(inputs: LayerInputs, by_id: bool) -> Tensor:
    """Returns what a layer's router is given of tokens beside their rows, [T] int64."""
    if not by_id or not isinstance(inputs, AttentionInputs):
        return inputs.slot_mapping
    assert inputs.token_ids is not None
    return inputs.token_ids


def _table_of_tokens(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """Returns the cosines and sines of T tokens, a row each, with three positions [3, T]: each pair
    turns by that of its axis."""
    num_pairs = len(axes)
    pairs = torch.arange(num_pairs, device=table.device)
    of_pairs = positions[axes].T
    return torch.cat((table[of_pairs, pairs], table[of_pairs, num_pairs + pairs]), dim=1)
