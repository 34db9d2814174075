"""Downloads checkpoints from the Hugging Face hub. Imported where one is named, as the
hub's library takes a tenth of a second, which every process of a node would pay."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from engine.config import LoadFormat
from engine.models.config.mistral_params import CONFIG_FILE, PARAMS_FILE, is_native
from engine.models.errors import CheckpointError

for _client in ("httpx", "httpcore", "httpx2", "httpcore2"):
    # What the hub's library asks with tells the addresses that it is sent on to, and who has one of
    # those may read the files of a private model for a while.
    logging.getLogger(_client).setLevel(logging.WARNING)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.jinja", "tiktoken.model", "*.safetensors"]
_OF_FOLDERS = ["*/*.safetensors"]
_OTHER_FORMS = [*_OF_FOLDERS, "consolidated*.safetensors"]
"""The same weights once more, as gpt-oss and Mistral publish them beside Hugging Face's form."""


def check_hub_name(name: str, folder: Path) -> None:
    """Raises `CheckpointError` where a name, as a `folder` none of this machine, cannot be one of
    the hub either."""
    if folder.exists():
        raise CheckpointError(folder, "is a file", "name the folder that holds config.json")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            folder, "does not exist", "check the path, or give a Hugging Face name like org/model"
        )


def download(
    name: str,
    folder: Path,
    load_format: LoadFormat,
    revision: str | None = None,
    *,
    check: Callable[[str], None] | None = None,
) -> Path:
    """Returns the folder of a checkpoint of the hub. `check` is given a folder with config.json
    alone and raises when the rest is not worth its hours. Raises `CheckpointError`."""
    check_hub_name(name, folder)
    others = _OTHER_FORMS
    patterns = _HUB_FILES if load_format == "safetensors" else _HUB_FILES[:-1]
    try:
        if check is not None:
            head = [CONFIG_FILE, PARAMS_FILE]
            found = snapshot_download(name, revision=revision, allow_patterns=head)
            check(found)
            others = _OF_FOLDERS if is_native(Path(found)) else _OTHER_FORMS
        return Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=others
            )
        )
    except RevisionNotFoundError as error:
        raise CheckpointError(
            name, f"has no revision {revision} on the hub", "name a branch, a tag or a commit of it"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            name,
            "is neither a local folder nor a model on the hub",
            "check the spelling; a private or gated model needs HF_TOKEN",
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            name,
            f"is no local folder and cannot be downloaded ({type(error).__name__})",
            "check the network and HF_TOKEN, or copy the checkpoint here and name its folder",
        ) from error
