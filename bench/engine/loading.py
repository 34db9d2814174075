"""Time loading of a checkpoint beside plain reads of its files, with its identity and without.

    python -m bench.engine.loading                           # 4 GiB are written, and removed
    python -m bench.engine.loading --gib 6 --device cuda --output loading-cuda
    python -m bench.engine.loading --model FOLDER            # a checkpoint that is there

Weights are random, in the shape of Llama-3.1-8B. Files are once in the page cache and once not
(`posix_fadvise`; a file system or disk with a cache of its own keeps them). Each figure is the
median of `--rounds`, in which all kinds take turns:

    read      the files in their order, by the loader's number of threads, into memory that is used
              again
    into      the same into memory for all of it, which the system gives page by page
    load      a rank of its own process loads all weights: on the CPU into such memory
    identity  the same, with the digests of all bytes as at a first start

A rank on a GPU has launched a kernel before: Triton takes 0.1 s to begin with, in every rank.
`peak_mib` is what the loading process took besides the weights. Writes bench/results/NAME.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import local

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bench.arguments import parser_of
from bench.engine.models.shapes import config_json
from bench.record import write_result
from engine.config import EngineConfig
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.files import content_digests
from engine.models.files.passing_digests import PassingDigests
from engine.models.files.stored_tensors import PIECE_BYTES
from engine.models.identity import IdentityJob
from engine.models.loader import load_weights, num_reading_threads
from engine.parallel.place import ParallelPlace
from tandem_kernels import ops

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """Holds what one load took: seconds until the weights are there, seconds until their identity
    is known, too, and bytes besides the weights."""

    weights_s: float
    all_s: float
    peak: int


def write_checkpoint(folder: Path, num_bytes: int) -> None:
    """Writes about `num_bytes` of random weights, in files of a GiB."""
    shape = config_json("llama-3.1-8b") | {"tie_word_embeddings": True}
    config = LlamaConfig(**shape)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0)
    embedding_bytes = 2 * config.vocab_size * config.hidden_size
    layer_bytes = sum(2 * weight.numel() for weight in layer.parameters())
    config.num_hidden_layers = max(1, (num_bytes - embedding_bytes) // layer_bytes)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu").tie_weights()
    for weight in model.parameters():
        weight.data.view(torch.int16).random_()
    model.save_pretrained(folder, max_shard_size=GIB)
    os.sync()


def read(files: list[Path], *, into: bool) -> Load:
    """Returns what reading all bytes takes. `into`: into new memory for all of them."""
    sizes = [file.stat().st_size for file in files]
    whole = memoryview(torch.empty(sum(sizes), dtype=torch.uint8).numpy()) if into else None
    own = local()
    began = time.perf_counter()
    with ThreadPoolExecutor(num_reading_threads()) as pool:
        first, reads = 0, []
        for file, size in zip(files, sizes, strict=True):
            descriptor = os.open(file, os.O_RDONLY)
            for start in range(0, size, PIECE_BYTES):
                count = min(PIECE_BYTES, size - start)
                place = None if whole is None else whole[first + start : first + start + count]
                reads.append(pool.submit(_read, descriptor, start, count, place, own))
            first += size
        for one in reads:
            one.result()
    seconds = time.perf_counter() - began
    return Load(seconds, seconds, 0)


def _read(file: int, start: int, count: int, place: memoryview | None, own: local) -> None:
    if place is None:
        if not hasattr(own, "memory"):
            own.memory = memoryview(bytearray(PIECE_BYTES))
        place = own.memory[:count]
    done = 0
    while done < count:
        done += os.preadv(file, [place[done:count]], start + done)


def load(folder: Path, device: str, *, with_identity: bool) -> Load:
    """Loads in a process of its own; this one is the engine core, which has the identity."""
    config, context = _engine(folder), multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    rank = context.Process(target=run_rank, args=(theirs, folder, device, with_identity))
    rank.start()
    theirs.close()
    with no_known_digests():
        ours.recv()
        began = time.perf_counter()
        ours.send("go")
        seconds, peak, digests = ours.recv()
        if with_identity:
            IdentityJob(config).result(digests)
        all_s = time.perf_counter() - began
    rank.join()
    return Load(seconds, all_s, peak)


@contextmanager
def no_known_digests() -> Iterator[None]:
    """Lets digests be kept where none are yet, as at a first start."""
    before = content_digests.store_folder
    with tempfile.TemporaryDirectory() as folder:
        content_digests.store_folder = lambda: Path(folder)
        try:
            yield
        finally:
            content_digests.store_folder = before


def run_rank(core: Connection, folder: Path, device: str, with_identity: bool) -> None:
    """Loads once the core has sent a word, and answers with seconds, peak bytes and digests."""
    config = _engine(folder)
    ids = torch.zeros(1, dtype=torch.int32, device=device)
    ops.embedding(ids, torch.ones(16, 64, dtype=torch.bfloat16, device=device))
    model = create_model(config, ParallelPlace(range(config.model.num_layers)), device)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    core.send("ready")
    core.recv()
    began = time.perf_counter()
    digests = PassingDigests() if with_identity else None
    with no_known_digests():
        load_weights(model, config, lambda fraction: None, digests=digests)
        found = list(digests.complete()) if digests is not None else []
    seconds = time.perf_counter() - began
    weights = sum(part.nbytes for part in model.parameters()) if device == "cpu" else 0
    core.send((seconds, _status("VmHWM") - before - weights, found))


def _engine(folder: Path) -> EngineConfig:
    model = load_model_config(folder, hashes_later=True)
    return EngineConfig(engine_id="loading", epoch=1, model=model)


def _status(field: str) -> int:
    """Returns a line of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def forget(files: list[Path]) -> None:
    """Drops the files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(folder: Path, device: str, rounds: int, *, is_cached: bool) -> dict[str, float]:
    """Returns the figures of one state of the page cache; each kind has it anew."""
    files = sorted(folder.glob("*.safetensors"))
    gib = sum(file.stat().st_size for file in files) / GIB
    kinds: dict[str, Callable[[], Load]] = {
        "read": lambda: read(files, into=False),
        "into": lambda: read(files, into=True),
        "load": lambda: load(folder, device, with_identity=False),
        "identity": lambda: load(folder, device, with_identity=True),
    }
    found: dict[str, list[Load]] = {kind: [] for kind in kinds}
    read(files, into=False)
    for _ in range(rounds):
        for kind, run in kinds.items():
            if not is_cached:
                forget(files)
            found[kind].append(run())
            print(kind, "cached" if is_cached else "cold", asdict(found[kind][-1]), flush=True)
    median = {kind: statistics.median(one.all_s for one in loads) for kind, loads in found.items()}
    plain = min(median["read"], median["into"]) if device != "cpu" else median["into"]
    return {
        **{f"{kind}_gib_s": round(gib / seconds, 2) for kind, seconds in median.items()},
        "load_against_reading": round(plain / median["load"], 3),
        "identity_against_load": round(median["identity"] / median["load"], 3),
        "peak_mib": round(max(one.peak for one in found["load"]) / (1 << 20), 1),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a folder; default: one is written")
    parser.add_argument("--gib", type=float, default=4, help="of the one that is written")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="loading", help="name of the result")
    given = parser.parse_args()
    folder = given.model or Path(tempfile.mkdtemp(prefix="loading-"))
    try:
        if given.model is None:
            write_checkpoint(folder, int(given.gib * GIB))
        figures = {
            "cores": len(os.sched_getaffinity(0)),
            "threads": num_reading_threads(),
            "device": given.device,
            "gib": round(sum(f.stat().st_size for f in folder.glob("*.safetensors")) / GIB, 2),
            "cached": measure(folder, given.device, given.rounds, is_cached=True),
            "cold": measure(folder, given.device, given.rounds, is_cached=False),
        }
    finally:
        if given.model is None:
            shutil.rmtree(folder)
    print(json.dumps(figures, indent=1))
    print(write_result(given.output, figures))


if __name__ == "__main__":
    main()
