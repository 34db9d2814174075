"""Describes the model that a node serves, once for each name that clients may use."""

from __future__ import annotations

import hashlib
import time

from decode_node.protocol.models import Model, ModelPermission
from edge.http.errors import NotFound
from engine.config import ModelConfig
from engine.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults


class ModelCards:
    """Knows the names of the model. `root` is what the operator called it."""

    def __init__(
        self, model: ModelConfig, root: str, defaults: SamplingDefaults = NO_DEFAULTS
    ) -> None:
        self._model = model
        self._root = root
        self._defaults = defaults
        self._created = int(time.time())

    def all(self) -> list[Model]:
        return [self._card(name) for name in self._model.served_names]

    def of(self, name: str) -> Model:
        """Returns the card of one name. Raises `NotFound`."""
        check_served(self._model, name)
        return self._card(name)

    def _card(self, name: str) -> Model:
        permission = ModelPermission(
            id="modelperm-" + hashlib.sha256(name.encode()).hexdigest()[:32], created=self._created
        )
        return Model(
            id=name,
            created=self._created,
            root=self._root,
            max_model_len=self._model.max_model_len,
            default_sampling_params=self._defaults.told(),
            permission=[permission],
        )


def check_served(model: ModelConfig, name: str | None) -> None:
    """Raises `NotFound` for a name that the model does not have; None is any."""
    if name is None or name in model.served_names:
        return
    served = ", ".join(repr(one) for one in model.served_names)
    raise NotFound(
        f"the model {name!r} does not exist; this server has {served}",
        param="model",
        code="model_not_found",
    )
