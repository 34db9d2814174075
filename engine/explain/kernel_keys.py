"""Finds which compiled kernels steps need, without a GPU.

1. `kernel_keys(config, gpu, batches)` passes batches through the model, of fake tensors
2. each operation's launcher runs on them; in place of a launch Triton's own key of the compilation
   is kept: types, alignments and constants of the arguments, and options

Two steps with the same keys need no compilation between them. What is compiled outside the model
(inputs of a step, sampling) is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.config import EngineConfig
from engine.explain.explanation import Batch, asked_model
from engine.explain.launches import Launches
from tandem_kernels import ops
from tandem_kernels.device import GpuFacts

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


class KernelKey(NamedTuple):
    """One compilation. `arguments`: by name, their types and constants as Triton has them."""

    kernel: str
    arguments: str
    options: str


def kernel_keys(
    config: EngineConfig, gpu: GpuFacts, batches: Sequence[Batch], *, has_flash: bool = True
) -> list[set[KernelKey]]:
    """Returns the kernels that the first rank of an engine needs for the model in each step.

    Args:
        has_flash: FlashAttention 3 is installed there.

    Raises:
        CannotStartError: The engine could not start either; says why.
    """
    found: list[set[KernelKey]] = []
    keys: set[KernelKey] = set()
    launches = Launches(on_kernel=_run_launcher)
    with _launches_kept(gpu, keys), asked_model(config, gpu, launches, has_flash) as run:
        for batch in batches:
            keys.clear()
            run(batch)
            found.append(set(keys))
    return found


def _run_launcher(op: ops.Op[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op.kernel(*args, **kwargs)


@contextmanager
def _launches_kept(gpu: GpuFacts, keys: set[KernelKey]) -> Iterator[None]:
    """Adds a key to `keys` for each kernel that is launched meanwhile, and launches none."""
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    JITFunction.run = _keeping(gpu, keys)
    try:
        yield
    finally:
        JITFunction.run = before


def _keeping(gpu: GpuFacts, keys: set[KernelKey]) -> Callable[..., None]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32))
    binders: dict[str, Callable[..., tuple[dict[str, Any], Any, Any]]] = {}

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        if name not in binders:
            binders[name] = create_function_from_signature(self.signature, self.params, backend)
        given = {"debug": False, "instrumentation_mode": "", **options}
        bound, kinds, _ = binders[name](*args, **given)
        # Of a constant the kind is the value itself, of the others what is known of it.
        named = ", ".join(f"{one}: {kind}" for one, kind in zip(bound, kinds, strict=False))
        keys.add(KernelKey(self.fn.__name__, named, str(sorted(options.items(), key=str))))

    return run
