"""Describes the model that a node serves, once for each name that clients may use."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from decode_node.protocol.models import Model, ModelPermission
from decode_node.serving.served_model import ServedModel
from engine.contracts.request_spec import AdapterRef


class ModelCards:
    """Knows the names of the model. `root` is what the operator called it."""

    def __init__(
        self,
        model: ServedModel,
        root: str,
        chat_format: Mapping[str, Any] | None = None,
    ) -> None:
        self._served = model
        self._model = model.config
        self._root = root
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
            display_name=name,
            created_at=datetime.fromtimestamp(self._created, UTC).isoformat(),
            max_input_tokens=self._model.max_model_len,
            default_sampling_params=self._served.defaults.to_dict(),
            permission=[permission],
            chat_format=self._chat_format,
        )
