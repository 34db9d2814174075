"""Bounds the prompt tokens of a step so that answers beside them get theirs within an objective.

    seconds of a step = decode + each(tokens) · tokens

*decode* is known twice: of steps in which rows of the idle class decode too, and of those without
any, which is what others have room in: those rows sit out while their prompts are computed
(`engine.sched.rows.running`). Where nothing shows it for `_BLIND_AFTER` steps, one step is had
without them.

1. unknown    no step was measured beside running answers: a step takes `_FIRST` tokens
2. measured   steps without prompts give `decode`, those with prompts `each`, for their number of
              tokens: the first of them cost most (weights are read again, kernels are launched), so
              what 64 take says little of 512. Both follow what is measured, and `each` rises at
              once and falls slowly, since a step that is too long is seen by every running answer
3. alone      nothing decodes: there is nothing to protect, steps are filled

A step is as many tokens as the CUDA graph that it will be has room for, or the one of its prompts
where it is run as two (`StepLaunches`), and no more than any has: launched one by one, 64 take the
host 44 ms and 256 take it 50.

Where that leaves no room, what was measured is halved in `_HALVES_IN` steps without prompts: one
step that something held up would else say so for ever, since no prompt comes that could measure it
again.

What must be computed here (no prefill node is left) goes on whatever the objective. Where no number
of tokens has room, a step takes as many as cost little more than the fewest that were measured:
of 2000 tokens, 64 a step, all answers would see 31 long steps. Who chooses whether to compute
prompts here asks `tokens_per_s`.
"""

from __future__ import annotations

from engine.contracts.steps.step_launches import StepLaunches, StepParts
from engine.sched.prompts.prompt_order import MANY_PROMPTS

_PART = 0.9
"""Steps aim at this much of the objective: half of them take longer than estimated."""
_FIRST = 256
_FEWEST = 64
_ALIKE = 1.25
"""A step that takes up to this many times another's time is as good."""
_UNIT = 64
"""Kernels work on tiles of this many tokens."""
_WEIGHT = 0.2
"""Weight of the last step in what is measured."""
_BLIND_AFTER = 64
_FOR_ALL = 64
"""One step of this many in which the idle class might sit out has all rows: none waits for ever."""
_HALVES_IN = 700
_FADES = 0.5 ** (1 / _HALVES_IN)
_SIZES = tuple(_UNIT << power for power in range(8))
"""Each stands for the numbers of tokens up to the next."""


class StepSlack:
    """Measures the steps of one engine. With an objective of 0 s nothing is bounded. `launches`:
    what the steps will be."""

    def __init__(self, objective_s: float, launches: StepLaunches | None = None) -> None:
        self.objective_s = objective_s
        self._launches = launches or StepLaunches(none="steps are not known")
        self._decode_s = 0.0
        """Steps without rows of the idle class take this long."""
        self._mixed_s = 0.0
        """Steps with some take this long."""
        self._num_unseen = 0
        """Steps since others decoded alone, while some do."""
        self._num_held = 0
        """Counts steps behind each other that the idle class sat out."""
        self._each_s: dict[int, float] = {}

    @property
    def is_blind(self) -> bool:
        """Returns whether a step without rows of the idle class is wanted, to be measured."""
        return self._num_unseen >= _BLIND_AFTER

    def holds_idle(self, has_prompts: bool, num_decodes: int, num_idle: int) -> bool:
        """Returns whether the idle class sits out the next step, which computes prompts of others
        (`has_prompts`), or shall show what their rows take. Is asked before each step, with the
        rows that decode, and those of the idle class that could sit out."""
        is_shown = self.is_blind and num_decodes > num_idle > 0
        is_wanted = self.objective_s > 0 and (has_prompts or is_shown)
        self._num_held = self._num_held + 1 if is_wanted else 0
        return self._num_held % _FOR_ALL > 0

    def limit(self, budget: int, decodes: StepParts, num_idle: int = 0) -> int:
        """Returns what of `budget` prompts may take of a step in which these rows decode, some of
        them of the idle class."""
        if not self.objective_s or not decodes.num_decodes:
            return budget
        tokens = self._tokens(self._decode_beside(num_idle)) or self._least()
        return min(budget, self._launches.beside(decodes, tokens) or tokens)

    def most_prompts(self, decodes: StepParts) -> int:
        """Returns of how many prompts such a step may compute parts so that it is a graph; any, if
        it is none with one."""
        most = self._launches.most_requests - decodes.num_decodes
        return most if self.objective_s and decodes.num_decodes and most > 0 else MANY_PROMPTS

    def tokens_per_s(self, usage: float) -> float:
        """Returns the prompt tokens a second that steps have room for beside what decodes, but the
        idle class; 0: none, or there is no objective. `usage`: of blocks or rows, whichever are
        rarer, 0..1. Answers stay longer when their steps do, so more of them are here at once: they
        must fit even if every second step is as long as the objective."""
        decode_s = self._decode_beside(0)
        if not self.objective_s or usage * (decode_s + self.objective_s) > 2 * decode_s:
            return 0.0
        return self._tokens(decode_s) / self.objective_s

    def observe(
        self, seconds: float, num_decodes: int, num_prompt_tokens: int, num_idle: int = 0
    ) -> None:
        """Learns from a step that has ended, in which `num_idle` of the rows that decoded were of
        the idle class."""
        if not self.objective_s or not num_decodes or seconds <= 0:
            return
        if num_idle:
            self._num_unseen += num_decodes > num_idle
        if not num_prompt_tokens:
            if num_idle:
                self._mixed_s = _followed(self._mixed_s, seconds)
            else:
                self._decode_s = _followed(self._decode_s, seconds)
                self._num_unseen = 0
            if not self._tokens(self._decode_beside(num_idle)):
                for size in self._each_s:
                    self._each_s[size] *= _FADES
            return
        each_s = max(0.0, seconds - self._decode_beside(num_idle)) / num_prompt_tokens
        size = max((one for one in _SIZES if one <= num_prompt_tokens), default=_SIZES[0])
        known_s = self._each_s.get(size, 0.0)
        self._each_s[size] = known_s + (each_s - known_s) * (1.0 if each_s > known_s else _WEIGHT)

    def _decode_beside(self, num_idle: int) -> float:
        """Returns what decoding alone takes, of which the other kind of steps tells more than
        nothing."""
        if num_idle:
            return self._mixed_s or self._decode_s
        return self._decode_s or self._mixed_s

    def _tokens(self, decode_s: float) -> int:
        room_s = _PART * self.objective_s - decode_s
        if room_s <= 0 or not self._each_s:
            return _FIRST if room_s > 0 else 0
        tokens, each_s = 0, self._each_s[min(self._each_s)]
        for size in _SIZES:
            # More tokens cost no more each than fewer do.
            each_s = min(each_s, self._each_s.get(size, each_s))
            most = int(room_s / each_s) if each_s else size * 2
            if most >= size:
                tokens = min(most, size * 2) // _UNIT * _UNIT
        return tokens

    def _least(self) -> int:
        """Returns the tokens of a step where none have room: the most that cost about as much as
        the fewest, or the first number of which that is not known."""
        tokens = _FEWEST
        most_s = _ALIKE * self._each_s.get(tokens, 0.0) * tokens
        for size in _SIZES:
            if self._each_s.get(size, 0.0) * size > most_s:
                break
            tokens = size
            if size not in self._each_s:
                break
        return tokens


def _followed(known_s: float, seconds: float) -> float:
    return known_s + (seconds - known_s) * (_WEIGHT if known_s else 1.0)
