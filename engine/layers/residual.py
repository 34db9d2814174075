"""The residual stream of one pass through a model."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.layers.norm import RMSNorm
from engine.layers.rows import (
    PairOutputs,
    PartialSum,
    RowForm,
    Rows,
    UnnormedRows,
    UnnormedSum,
    UnscaledProduct,
)

Addend = Tensor | UnscaledProduct | PartialSum | PairOutputs | UnnormedSum


class ResidualStream:
    """The sum of what all layers have added so far, [T, H].

    What a layer adds waits until the next norm, which sums and normalises in one kernel; a GEMM
    that can add to the sum itself does so (`RowParallelLinear.add_to`). Ranks' parts of it, what
    single experts give, and what is normed before it is added, may wait, too, for a norm that does
    all that.

    Args:
        x: [T, H], what the first layer reads. Its memory becomes the stream's.
    """

    def __init__(self, x: Tensor) -> None:
        self.sum = x
        self._waiting: Addend | None = None

    def add(self, x: Addend) -> None:
        """Adds [T, H] before the next read. Its memory may be reused."""
        assert self._waiting is None, "the stream is read between two additions"
        self._waiting = x

    def add_to_rows(self, rows: Tensor, x: Tensor) -> None:
        """Adds [n, H] to `rows` [n] of the stream."""
        waiting = self._taken()
        if waiting is not None:
            plain = waiting.scaled() if isinstance(waiting, UnscaledProduct) else waiting
            self.sum = self.sum + plain
        self.sum.index_add_(0, rows, x)

    def settled(self) -> Tensor | None:
        """Returns the sum itself, [T, H], to which a kernel may add; None: something waits."""
        return self.sum if self._waiting is None else None

    def keep(self, rows: Tensor) -> None:
        """Goes on with `rows` [n] alone. Nothing waits to be added."""
        assert self._waiting is None, "what waits has all rows"
        self.sum = self.sum.index_select(0, rows)

    def scale(self, factor: Tensor) -> None:
        """Multiplies the stream by `factor` [1]."""
        waiting = self._waiting
        if isinstance(waiting, UnnormedSum) and waiting.scale is None:
            self._waiting = replace(waiting, scale=factor)
        else:
            self.sum = self.read(None).mul_(factor)

    def value(self) -> Tensor:
        """Returns a copy of the stream, [T, H], which goes on as if nothing had looked."""
        self._waiting = waiting = self._taken()
        if waiting is None:
            return self.sum.clone()
        if isinstance(waiting, UnscaledProduct):
            waiting = replace(waiting, product=waiting.product.clone()).scaled()
        return self.sum + waiting

    def read(self, norm: RMSNorm | None) -> Tensor:
        """Returns what a block works on, [T, H]: the norm of the stream, or the stream itself."""
        if norm is not None:
            return self.normed(norm)
        if (waiting := self._taken()) is not None:
            plain = waiting.scaled() if isinstance(waiting, UnscaledProduct) else waiting
            self.sum = self.sum + plain
        return self.sum

    def read_rows(self, norm: RMSNorm | None, form: RowForm | None) -> Rows:
        """Does what `read` does; returns a norm as the `input_form` of the next layer asks for."""
        if norm is None or form is None:
            return self.read(norm)
        return norm.add_quantised(self._taken(), self.sum, form)

    def read_unnormed(self, norm: RMSNorm | None, form: RowForm | None) -> Rows | UnnormedRows:
        """Does what `read_rows` does, but leaves the norm to a reader that may have a kernel for
        it. What waits must be added first, so then it is computed here, in the same kernel."""
        rows = self.settled()
        if norm is None or form is not None or rows is None:
            return self.read_rows(norm, form)
        return UnnormedRows(rows, norm.weight, norm.eps)

    def normed_by(self, *norms: RMSNorm) -> tuple[Tensor, ...]:
        """Returns norms of the stream, [T, H] each."""
        if not isinstance(self._waiting, UnnormedSum):
            first, *others = norms
            return (self.normed(first), *(norm(self.sum) for norm in others))
        waiting, self._waiting = self._waiting, None
        return waiting.add_to(self.sum, *(norm.form for norm in norms))

    def normed(self, norm: RMSNorm) -> Tensor:
        """Returns the norm of the stream, [T, H]."""
        normed: Tensor
        if isinstance(self._waiting, UnnormedSum):
            (normed,) = self.normed_by(norm)
            return normed
        if isinstance(self._waiting, PartialSum):
            part, self._waiting = self._waiting, None
            normed, self.sum = norm.add_part(part, self.sum)
            return normed
        if isinstance(self._waiting, PairOutputs):
            pairs, self._waiting = self._waiting, None
            return norm.add_pairs(pairs, self.sum)
        waiting = self._taken()
        if waiting is None:
            normed = norm(self.sum)
            return normed
        if isinstance(waiting, UnscaledProduct):
            return norm.add_unscaled(waiting, self.sum)
        normed, self.sum = norm.add(waiting, self.sum)
        return normed

    def _taken(self) -> Tensor | UnscaledProduct | None:
        """Returns what waits, summed over ranks and experts, and which then waits no more. What is
        normed first is in the stream then."""
        waiting, self._waiting = self._waiting, None
        if isinstance(waiting, UnnormedSum):
            waiting.add_to(self.sum)
            return None
        return waiting.summed() if isinstance(waiting, PartialSum | PairOutputs) else waiting


class NormedStream(ResidualStream):
    """A stream that goes on with what a norm makes of it, `factor` times, wherever a block reads it
    (DeepNorm, arXiv 2203.00555, with the norm in front of the block that reads it)."""

    def __init__(self, x: Tensor, factor: float) -> None:
        super().__init__(x)
        self.factor = factor

    def settled(self) -> Tensor | None:
        """Returns no [T, H]: nothing may be added to what is still to be normed."""
        return None

    def read_rows(self, norm: RMSNorm | None, form: RowForm | None) -> Rows:
        rows = self.read(norm)
        return rows if norm is None or form is None else form.quantised(rows)

    def normed(self, norm: RMSNorm) -> Tensor:
        """Returns the norm of the stream, [T, H]."""
        normed = super().normed(norm)
        self.sum = normed * self.factor
        return normed
