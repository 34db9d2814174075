"""Says what Triton would compile for a launch, on a machine that need not have the GPU.

1. `keeping(gpu, keep)`: inside, launches run no kernel; what each would compile is given to `keep`
2. `Compilation.key` tells compilations apart; `Compilation.compile` puts the kernel into Triton's
   cache, where a launch with the same arguments finds it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem_kernels.device import GpuFacts

if TYPE_CHECKING:
    from triton.runtime.jit import JITFunction


class KernelKey(NamedTuple):
    """One compilation. `arguments`: by name, their types and constants as Triton has them."""

    kernel: str
    arguments: str
    options: str


@dataclass(frozen=True, slots=True)
class Compilation:
    """A kernel with all that its code depends on.

    Attributes:
        backend: Triton's compiler for the GPU.
        given: The launch's arguments and options by name, as far as it named them.
        bound: All arguments by name.
        kinds: Of each argument its type, and what is known of its value.
        options: What of `given` is no argument.
    """

    key: KernelKey
    kernel: JITFunction[Any]
    backend: Any
    given: dict[str, Any]
    bound: dict[str, Any]
    kinds: list[Any]
    options: dict[str, Any]

    def compile(self) -> None:
        """Compiles the kernel as its launch would: raises what Triton does."""
        import triton
        from triton.backends.nvidia import driver
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        given = self.backend, dict(self.given), self.bound, self.kinds, self.options
        options, signature, constants, attributes = self.kernel._pack_args(*given)
        kind = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = kind(self.kernel, signature, constants, attributes)
        target, named = self.backend.target, options.__dict__
        compiled = triton.compile(source, target=target, options=named)
        if hasattr(driver, "make_launcher"):
            # Up to Triton 3.6 the function that launches it is compiled C as well.
            driver.CudaLauncher(compiled.src, compiled.metadata)


@contextmanager
def keeping(gpu: GpuFacts, keep: Callable[[Compilation], None]) -> Iterator[None]:
    """Calls `keep` for each kernel that is launched meanwhile, and launches none."""
    from triton.runtime.jit import JITFunction

    before = JITFunction.run
    JITFunction.run = _kept(gpu, keep)
    try:
        yield
    finally:
        JITFunction.run = before


def _kept(gpu: GpuFacts, keep: Callable[[Compilation], None]) -> Callable[..., None]:
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
        bound, kinds, others = binders[name](*args, **given)
        # Of a constant the kind is the value itself, of the others what is known of it.
        named = ", ".join(f"{one}: {kind}" for one, kind in zip(bound, kinds, strict=False))
        key = KernelKey(self.fn.__name__, named, str(sorted(options.items(), key=str)))
        keep(Compilation(key, self, backend, given, bound, kinds, others))

    return run
