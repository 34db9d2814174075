"""Finds the files of a checkpoint's tokenizer, and makes them of other forms that are published.

    tokenizer.json    is there: the checkpoint's own folder is the answer
    tiktoken.model    Kimi's form (`kimi`)
    tekken.json       Mistral's form (`tekken`)

What is made of the latter two is kept in `tandem/tokenizers` of `HF_HOME` (`kept_folders`):
tokenizer.json, and copies of the small files beside it, so that the folder has all that a tokenizer
needs. Torch-free.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path

import xxhash

from engine.models.config.json_file import read_json

logger = logging.getLogger(__name__)

TOKENIZER_FILE, _CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
_OTHER_FORMS = ("tiktoken.model", "tekken.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_BESIDE = (_CONFIG_FILE, "special_tokens_map.json", *_TEMPLATES)
_FORMAT = 1
"""Changes with what is written."""


def has_tokenizer(folder: Path) -> bool:
    """Returns whether a checkpoint has a tokenizer in a form that is read."""
    return any((folder / name).is_file() for name in (TOKENIZER_FILE, *_OTHER_FORMS))


def tokenizer_folder(folder: Path) -> Path:
    """Returns the folder with the tokenizer.json of a checkpoint, and what belongs to it; without
    any form of it the checkpoint's own. Raises `CheckpointError`."""
    form = next((folder / name for name in _OTHER_FORMS if (folder / name).is_file()), None)
    if form is None or (folder / TOKENIZER_FILE).is_file():
        return folder
    from engine.models.files.kept_folders import STORE, kept_folder

    beside = [folder / name for name in _BESIDE if (folder / name).is_file()]
    state = _digest([form, *beside], _template_maker(form))

    def write(place: Path) -> None:
        logger.info("making a tokenizer.json of %s, which is done once", form)
        for path in beside:
            shutil.copyfile(path, place / path.name)
        _write(form, place)

    return kept_folder(STORE / "tokenizers" / state / folder.name, write)


def _digest(files: Iterable[Path], template_maker: str) -> str:
    """Returns what differs when the files say something else: hosts of one group of workers find
    the folder in the same place."""
    digest = xxhash.xxh3_64(f"{_FORMAT} {template_maker}".encode())
    for path in files:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return str(digest.hexdigest())


@cache
def _version_of_template_maker() -> str:
    try:
        return metadata.version("mistral-common")
    except metadata.PackageNotFoundError:
        return ""


def _template_maker(form: Path) -> str:
    """Returns the version of what makes a chat template of this form; "": nothing does."""
    return _version_of_template_maker() if form.name == "tekken.json" else ""


def _write(form: Path, place: Path) -> None:
    # Seldom needed, and the library takes time to import.
    from engine.models.vocabularies.kimi import read_kimi
    from engine.models.vocabularies.ranked_bpe import write_json
    from engine.models.vocabularies.tekken import NAMES, read_tekken, tekken_template

    if form.name != "tekken.json":
        read_kimi(form).save(str(place / TOKENIZER_FILE))
        return
    read_tekken(form).save(str(place / TOKENIZER_FILE))
    config = place / _CONFIG_FILE
    own = read_json(config, dict[str, object]) if config.is_file() else {}
    write_json(config, {**NAMES, **own})
    has_template = any((place / name).is_file() for name in _TEMPLATES)
    if not has_template and own.get("chat_template") is None:
        template = tekken_template(form)
        if template is not None:
            (place / _TEMPLATES[0]).write_text(template, encoding="utf-8")
