"""Time how fast one rank loads a checkpoint, and the memory that it takes besides its parameters.

    python -m bench.engine.loading                             # a checkpoint of 4 GiB, made for it
    python -m bench.engine.loading --model FOLDER --device cuda --threads 1,2,4,8,16

Each way is timed with the files in the page cache (warm) and dropped from it (cold). `mapping` is
what safetensors does by itself: it maps the files, and copies tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench.record import write_result
from engine.models.weight_files import WeightFiles
from engine.models.weight_reader import PIECE_BYTES, Piece, WeightReader

_GIB = 1 << 30
_ROWS, _COLS = 4096, 4096
_SHARD_TENSORS = 32


class Tensors:
    """The tensors of a checkpoint, and parameters on a device for all of them."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.files = sorted(folder.glob("*.safetensors"))
        stored = WeightFiles(folder).tensors.values()
        self.stored = sorted(stored, key=lambda tensor: (tensor.file, tensor.start))
        self.targets = {
            tensor.name: torch.empty(tensor.num_bytes, dtype=torch.uint8, device=device).zero_()
            for tensor in self.stored
        }
        self.num_bytes = sum(tensor.num_bytes for tensor in self.stored)

    def map(self) -> None:
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name in list(file.keys()):
                    source = file.get_slice(name)[:].reshape(-1).view(torch.uint8)
                    self.targets[name].copy_(source)

    def read(self, num_threads: int) -> None:
        jobs = [
            Job(tensor.name, start - tensor.start, Piece(tensor.file, start, stop))
            for tensor in self.stored
            for start in range(tensor.start, tensor.stop, PIECE_BYTES)
            for stop in [min(start + PIECE_BYTES, tensor.stop)]
        ]
        for job, [memory] in WeightReader(num_threads).read(jobs):
            self.targets[job.name][job.offset : job.offset + len(memory)].copy_(memory)

    def drop_from_cache(self) -> None:
        for path in self.files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class Job:
    """One piece of one tensor."""

    def __init__(self, name: str, offset: int, piece: Piece) -> None:
        self.name, self.offset, self.pieces = name, offset, (piece,)


def write_checkpoint(folder: Path, num_bytes: int) -> None:
    """Writes shards of random numbers, 1 GiB each."""
    num_tensors = max(1, num_bytes // (2 * _ROWS * _COLS))
    weight_map = {}
    for first in range(0, num_tensors, _SHARD_TENSORS):
        names = [f"t{i}" for i in range(first, min(first + _SHARD_TENSORS, num_tensors))]
        tensors = {name: torch.randn(_ROWS, _COLS).to(torch.bfloat16) for name in names}
        save_file(tensors, folder / f"{first}.safetensors")
        weight_map |= dict.fromkeys(names, f"{first}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def resident(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024


def measure(tensors: Tensors, way: Callable[[], None], *, is_cold: bool) -> tuple[float, float]:
    """Returns GiB/s, and by how many MiB the process grew meanwhile."""
    if is_cold:
        tensors.drop_from_cache()
    Path("/proc/self/clear_refs").write_text("5")
    before, started = resident("VmRSS"), time.perf_counter()
    way()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return tensors.num_bytes / _GIB / seconds, (resident("VmHWM") - before) / (1 << 20)


def run(folder: Path, device: torch.device, threads: list[int], repeats: int) -> list[dict]:
    tensors = Tensors(folder, device)
    largest = max(path.stat().st_size for path in tensors.files) >> 20
    print(f"{tensors.num_bytes / _GIB:.1f} GiB, largest shard {largest} MiB, to {device}")
    ways: dict[str, Callable[[], None]] = {"mapping": tensors.map}
    ways |= {f"{n} threads": lambda n=n: tensors.read(n) for n in threads}
    found = []
    for is_cold in (True, False):
        for name, way in ways.items():
            runs = [measure(tensors, way, is_cold=is_cold) for _ in range(repeats)]
            rates, grown = sorted(rate for rate, _ in runs), max(mib for _, mib in runs)
            state = "cold" if is_cold else "warm"
            middle = rates[len(rates) // 2]
            print(f"{state} {name}: {middle:.2f} GiB/s ({rates[0]:.2f} .. {rates[-1]:.2f}), "
                  f"{grown:.0f} MiB besides")  # fmt: skip
            found.append({"state": state, "way": name, "gib_per_s": rates, "mib": round(grown)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; none: one is made")
    parser.add_argument("--gib", type=float, default=4.0, help="size of the one that is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", help="write the figures to bench/results/NAME.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    threads = [int(n) for n in given.threads.split(",")]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.model or Path(scratch)
        if given.model is None:
            write_checkpoint(folder, int(given.gib * _GIB))
        found = run(folder, torch.device(given.device), threads, given.repeats)
    if given.name:
        write_result(given.name, found)


if __name__ == "__main__":
    main()
