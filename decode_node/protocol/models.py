"""Writes the bodies of /v1/models, with the fields of OpenAI, vLLM and Anthropic together: clients
of each look for theirs at the same path."""

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
        type, display_name, created_at, lifecycle, max_input_tokens: What Anthropic's clients read.
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
    type: str = "model"
    display_name: str
    created_at: str
    lifecycle: str = "active"
    max_input_tokens: int
    default_sampling_params: dict[str, float]
    permission: list[ModelPermission]
    chat_format: dict[str, Any] = {}


class ModelList(msgspec.Struct, kw_only=True):
    """Lists models, all of them on one page, as Anthropic's clients ask for pages."""

    object: str = "list"
    data: list[Model]
    first_id: str
    last_id: str
    has_more: bool = False
