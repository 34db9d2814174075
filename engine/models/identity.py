"""The identity of a model, which nodes compare before KV goes from one to the other.

1. a node reads the configuration: `model_hash` is `PENDING`, for all bytes of the weights count
2. its workers load them. One that reads all of them hashes what passes by (`passing_digests`);
   beside several, which read slices, `IdentityJob` reads and hashes the same files meanwhile
3. workers, engine core and node server get the identity before anything compares it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import xxhash

from engine.config import EngineConfig, ModelConfig
from engine.contracts.model_identity import PENDING
from engine.models.files.content_digests import FileDigests
from engine.models.files.weight_files import WeightFiles
from engine.models.registry import MODELS, spec_of


def model_hash_of(model: ModelConfig, found: Sequence[FileDigests] = ()) -> str:
    """Returns what is equal exactly for models that compute the same KV: a digest of all that this
    depends on but the dtype, which peers compare by name. `found`: what is known of the files
    already. Raises `CheckpointError`."""
    if model.model_hash != PENDING:
        return model.model_hash
    facts: tuple[Any, ...] = spec_of(model).hash_facts(model)
    facts += () if model.quantization is None else (model.quantization,)
    facts += () if model.vision is None else (model.vision,)
    digest = xxhash.xxh3_128(repr(facts).encode())
    if model.load_format == "dummy":
        digest.update(b"dummy")
    else:
        renamed = MODELS[model.architecture].renamed_tensors
        files = WeightFiles(Path(model.path), model.wrapper, renamed)
        digest.update(files.fingerprint(with_tower=model.vision is not None, found=found))
    return digest.hexdigest()


class IdentityJob:
    """Finds the identity of an engine's model: in a thread of its own while several ranks load it,
    or out of what a rank alone has found meanwhile."""

    def __init__(self, config: EngineConfig) -> None:
        self._model = config.model
        self._found = ""
        self._error: BaseException | None = None
        self._thread: Thread | None = None
        if config.parallel.num_ranks > 1:
            self._thread = Thread(target=self._run, name="model-identity", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._found = model_hash_of(self._model)
        except BaseException as error:
            self._error = error

    def result(self, found: Sequence[FileDigests] = ()) -> str:
        """Waits for it. `found`: by the rank that has loaded all. Raises `CheckpointError`."""
        if self._thread is None:
            return model_hash_of(self._model, found)
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found
