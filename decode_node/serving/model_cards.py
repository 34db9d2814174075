"""Describes the model that a node serves, once for each name that clients may use."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from decode_node.errors import Unavailable
from decode_node.protocol.models import Model, ModelPermission
from edge.http.errors import NotFound
from engine.config import ModelConfig
from engine.contracts.request_spec import AdapterRef
from engine.models.sampling_defaults import NO_DEFAULTS, SamplingDefaults


class ModelCards:
    """Knows the names of the model. `root` is what the operator called it."""

    def __init__(
        self,
        model: ServedModel,
        root: str,
        defaults: SamplingDefaults = NO_DEFAULTS,
        chat_format: Mapping[str, Any] | None = None,
    ) -> None:
        self._served = model
        self._model = model.config
        self._root = root
        self._defaults = defaults
        self._chat_format = dict(chat_format or {})
        self._created = int(time.time())

    def all(self) -> list[Model]:
        adapters = self._served.adapters.values()
        own = [self._card(name) for name in self._model.served_names]
        return own + [self._adapter_card(ref) for ref in adapters]

    def of(self, name: str) -> Model:
        """Returns the card of one name. Raises `NotFound`."""
        adapter = self._served.check(name)
        return self._card(name) if adapter is None else self._adapter_card(adapter)

    def _adapter_card(self, adapter: AdapterRef) -> Model:
        """Returns the card of an adapter: `parent` is its model, `root` what it is."""
        card = self._card(adapter.name)
        card.root, card.parent = f"sha256:{adapter.digest}", self._model.served_model_name
        return card

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
            chat_format=self._chat_format,
        )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Knows by which names the model is asked for, and its adapters.

    Attributes:
        adapters: By name, as they are now.
    """

    config: ModelConfig
    adapters: Mapping[str, AdapterRef]

    def check(self, name: str | None, meant: str = "") -> AdapterRef | None:
        """Returns the adapter of that name; None: the model itself, which a request without a name
        means, too. `meant`: the digest that a router means by the name, if it says so.

        Raises:
            NotFound: There is nothing of this name.
            Unavailable: The name stands for another adapter elsewhere.
        """
        adapter = None if name is None else self.adapters.get(name)
        if meant and (adapter is None or adapter.digest != meant):
            raise Unavailable(
                "the adapter of this name was replaced here; send the request to another node",
                code="adapter_changed",
            )
        if adapter is not None or name is None or name in self.config.served_names:
            return adapter
        served = ", ".join(repr(one) for one in (*self.config.served_names, *self.adapters))
        raise NotFound(
            f"the model {name!r} does not exist; this server has {served}",
            param="model",
            code="model_not_found",
        )
