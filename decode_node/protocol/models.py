"""Writes the bodies of /v1/models, with vLLM's fields: clients look for them."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelPermission(msgspec.Struct, kw_only=True):
    """Says what callers may do with a model. Once part of OpenAI's API; some clients still ask."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class Model(msgspec.Struct, kw_only=True):
    """Describes a model.

    Attributes:
        root: What the operator called it: a folder or a name on the hub.
        chat_format: How its chats are written and read: the names of the parsers, and what the chat
            template takes.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "tandem"
    root: str
    parent: str | None = None
    max_model_len: int
    default_sampling_params: dict[str, float]
    permission: list[ModelPermission]
    chat_format: dict[str, Any] = {}


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[Model]
