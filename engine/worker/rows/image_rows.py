"""Images of rows on a worker: their embeddings, and the positions of tokens among and behind them.

1. `run` encodes what the step message names, and drops what it names
2. `add_request` notes a row's images; all its tokens behind them get their positions on the
   device, in recorded steps too
3. `inputs`: a step with tokens before the end of a row's last image takes three positions a
   token and embeddings from here. Such steps are never recorded
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.buffer_utils import HostBackedTensor, to_device
from engine.batch.input_batch import BatchOrder, InputBatch
from engine.batch.row_states import RowStates
from engine.config import EngineConfig
from engine.contracts.scheduler_output import EncodingOutput, NewRequestData, SchedulerOutput
from engine.images.image_input import ImageSpan, position_delta
from engine.images.image_limits import ImageLimits
from engine.images.positions import prompt_positions
from engine.layers.attention.backend import WholeImage
from engine.models.base import ImageInputs
from engine.models.vision.tower import VisionTower


class MissingEmbeddings(RuntimeError):
    """A step computes tokens of an image that no step has encoded: the messages are out of step."""


class TextRows:
    """Stands where no model sees images: positions are those of the batch."""

    carried: tuple[HostBackedTensor, ...] = ()

    def run(self, step: SchedulerOutput) -> None:
        """Has nothing to do."""

    def dummy_run(self) -> None:
        """Takes no memory."""

    def add_request(self, new: NewRequestData) -> None:
        """Has nothing to note."""

    def needed_by(self, order: BatchOrder, states: RowStates) -> bool:
        """Returns that no step needs it."""
        return False

    def inputs(self, batch: InputBatch, states: RowStates) -> tuple[torch.Tensor, None]:
        """Returns the batch's positions, [T] int64."""
        return batch.positions, None


class ImageRows:
    """Owned by the runner of a model that sees images; `tower` None: others encode."""

    def __init__(
        self,
        num_rows: int,
        tower: VisionTower | None,
        device: torch.device,
        limits: ImageLimits,
        *,
        has_axes: bool,
        sees_whole: bool = False,
        in_windows: bool = False,
    ) -> None:
        self._tower = tower
        self._has_axes = has_axes
        """Tokens of images have three positions."""
        self._sees_whole = sees_whole
        """They see all of their image."""
        self._in_windows = in_windows
        """They do so in layers with a window alone."""
        self._device = device
        self._limits = limits
        self._deltas = HostBackedTensor(num_rows, np.int32, device)
        self._images: dict[int, tuple[ImageSpan, ...]] = {}  # [row]
        self._ends: dict[int, int] = {}  # [row] -> end of its images, while it is among them
        self._positions: dict[int, npt.NDArray[np.int64]] = {}  # [row] -> [3, that end]
        self._embeddings: dict[bytes, torch.Tensor] = {}  # [digest] -> [1 + taps, tokens, H]

    @property
    def carried(self) -> tuple[HostBackedTensor, ...]:
        """Returns the array that is carried over before a step."""
        return (self._deltas,)

    @property
    def num_held(self) -> int:
        """Returns how many images have embeddings here."""
        return len(self._embeddings)

    def run(self, step: SchedulerOutput) -> None:
        """Drops and encodes what a step asks for."""
        if not isinstance(step, EncodingOutput):
            return
        for digest in step.images.dropped:
            del self._embeddings[digest]
        for image in step.images.encoded:
            assert self._tower is not None
            self._embeddings[image.digest] = self._tower.encode(image)

    def dummy_run(self) -> None:
        """Takes as much memory as images ever may: the largest is encoded, beside embeddings of as
        many tokens as are held. Warms up. Not on a CPU, whose cache leaves most of the memory."""
        if self._tower is None or self._device.type == "cpu":
            return
        found = self._tower.encode(self._tower.spec.blank_image(self._limits.largest))
        found.new_empty((len(found), self._limits.capacity, found.shape[2]))

    def add_request(self, new: NewRequestData) -> None:
        """Notes the images of a row's new owner."""
        self._images.pop(new.row, None)
        self._positions.pop(new.row, None)
        self._ends.pop(new.row, None)
        delta = position_delta(new.images) if self._has_axes else 0
        if delta != self._deltas.np[new.row]:
            self._deltas.write(new.row, delta)
        if new.images:
            self._images[new.row] = new.images
            if new.num_computed_tokens < new.images[-1].end:
                self._ends[new.row] = new.images[-1].end
                if self._has_axes:
                    self._positions[new.row] = prompt_positions(new.images)

    def needed_by(self, order: BatchOrder, states: RowStates) -> bool:
        """Returns whether the step has tokens before the end of a row's last image."""
        return bool(self._ends) and any(
            row in self._ends and states.num_computed_np[row] < self._ends[row]
            for row in order.rows.tolist()
        )

    def _rope_positions(self, batch: InputBatch) -> torch.Tensor:
        """Returns [T] int64: the position of each token, if it is behind its row's images."""
        tokens = torch.arange(len(batch.positions), device=self._device, dtype=torch.int32)
        bounds = batch.query_start_loc[1:].contiguous()
        requests = torch.searchsorted(bounds, tokens, right=True).clamp_(max=len(bounds) - 1)
        rows = batch.idx_mapping.clamp(min=0).index_select(0, requests)
        return batch.positions + self._deltas.tensor.index_select(0, rows)

    def inputs(
        self, batch: InputBatch, states: RowStates
    ) -> tuple[torch.Tensor, ImageInputs | None]:
        """Returns the positions of all tokens, [T], and what the model is given of images; None:
        nothing."""
        order, positions = batch.order, self._rope_positions(batch)
        if not self.needed_by(order, states):
            return positions, None
        of_axes = positions.expand(3, -1).clone() if self._has_axes else None
        places: list[npt.NDArray[np.int64]] = []
        embeddings: list[torch.Tensor] = []
        wholes: list[WholeImage] = []
        start = 0
        lengths = zip(order.rows.tolist(), order.query_lens.tolist(), strict=True)
        for request, (row, length) in enumerate(lengths):
            if row in self._ends:
                first = int(states.num_computed_np[row])
                if of_axes is not None:
                    known = self._positions[row][:, first : first + length]
                    part = to_device(np.ascontiguousarray(known), self._device)
                    of_axes[:, start : start + known.shape[1]] = part
                for image in self._images[row]:
                    low, high = max(first, image.offset), min(first + length, image.end)
                    if low < high:
                        tokens, found = embedded(image, low, high)
                        embeddings.append(self._of(image)[:, found])
                        places.append(tokens - first + start)
                        rows = slice(start + low - first, start + high - first)
                        place = image.offset, high, self._in_windows
                        wholes.append(WholeImage(request, rows, *place))
            start += length
        if not embeddings:
            return positions, ImageInputs(of_axes)
        at = to_device(np.concatenate(places), self._device)
        seen = tuple(wholes) if self._sees_whole else ()
        return positions, ImageInputs(of_axes, at, torch.cat(embeddings, dim=1), seen)

    def _of(self, image: ImageSpan) -> torch.Tensor:
        found = self._embeddings.get(image.digest)
        if found is None:
            raise MissingEmbeddings(
                f"image {image.digest.hex()[:12]} was not encoded; the engine must be restarted"
            )
        return found


def embedded(image: ImageSpan, first: int, stop: int) -> tuple[npt.NDArray[np.int64], slice]:
    """Returns which of the prompt's tokens `[first, stop)`, all of the image, have embeddings of
    it, and which these are."""
    width = image.columns + image.row_ends
    rows, columns = np.divmod(np.arange(first, stop) - image.offset, width)
    has = columns < image.columns
    places = (rows * image.columns + columns)[has]
    start = image.first + (int(places[0]) if len(places) else 0)
    return np.arange(first, stop)[has], slice(start, start + len(places))


def create_image_rows(
    config: EngineConfig, tower: VisionTower | None, device: torch.device
) -> ImageRows | TextRows:
    """Returns what the model's rows need."""
    if config.model.vision is None or config.images.max_images == 0:
        return TextRows()
    vision, limits = config.model.vision, ImageLimits(config)
    return ImageRows(
        config.scheduler.max_num_seqs,
        tower,
        device,
        limits,
        has_axes=bool(vision.rope_axes),
        sees_whole=vision.sees_whole,
        in_windows=vision.sees_whole_in_windows,
    )
