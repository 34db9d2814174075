"""Knows which models there are: those that nodes serve, and those that the rules name.

1. reported    a decode node says which model it serves, and by which names
2. away        no member serves it any more: for `remember_s` its requests get 503, not 404. A model
               that the rules name is never forgotten
3. forgotten   404

`table` is made anew when nodes or rules have changed, and never changes itself: a request is routed
by one state of things, in whatever thread it is read.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from edge.http.errors import BadRequest
from router.errors import ModelNotFound
from router.models.adapter_names import AdapterNames
from router.models.model_rules import MAX_NAME, ModelRules
from router.models.rules_file import RulesFile
from router.nodes.address import NodeAddress, NodeRole
from router.nodes.node import Node
from router.nodes.partners import by_weights, partners_of_all
from router.nodes.registry import NodeRegistry
from router.nodes.report import NodeReport
from router.request.model_route import ModelRoute, plain_route

logger = logging.getLogger(__name__)

_MAX_SHOWN_NAME = 100
_MAX_LISTED = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """Leads names to models.

    Attributes:
        served: Every name by which decode nodes serve, and the first name of its model.
        expected: Models without a node, which should have or lately had one.
        adapters: By name: the adapter's digest and its model. Of several digests, the one that most
            decode nodes have.
        max_model_lens: Tokens that prompt and answer may have together, by model, as the decode
            node says that takes the most.
        is_settling: A decode node has yet to say for the first time what it serves.
    """

    rules: ModelRules
    served: Mapping[str, str]
    expected: Collection[str] = ()
    adapters: AdapterNames = field(default_factory=lambda: AdapterNames({}))
    max_model_lens: Mapping[str, int] = field(default_factory=dict)
    is_settling: bool = False

    def route(self, asked: str) -> ModelRoute:
        """Returns the route of a request for `asked`, "" if it names no model.

        Raises:
            ModelNotFound: there is no such model; the message names those that there are.
            BadRequest: no model is named, and there are several.
        """
        if not asked:
            return self._only_route()
        name = self.rules.aliases.get(asked, asked)
        split = self.rules.splits.get(name)
        if split is not None:
            versions = {self.served.get(version, version): weight for version, weight in split}
            return ModelRoute(name, tuple(versions.items()))
        if name not in self.served and name in self.adapters:
            digest, model = self.adapters[name]
            return ModelRoute(model, ((model, 1.0),), name, digest)
        may_come = len(asked) <= MAX_NAME and (self.is_settling or not self.served)
        if name in self.served or name in self.expected or may_come:
            return plain_route(self.served.get(name, name))
        raise self.not_found(asked)

    def not_found(self, asked: str) -> ModelNotFound:
        shown = repr(asked[:_MAX_SHOWN_NAME])
        return ModelNotFound(f"The model {shown} does not exist here. There is: {self._listed()}.")

    def models(self) -> set[str]:
        """Returns the models, by their first names."""
        return {*self.served.values(), *self.expected}

    def versions(self) -> set[tuple[str, str]]:
        """Returns each (model, version) that requests may be counted under."""
        routes = [self.route(name) for name in (*self.models(), *self.rules.splits)]
        return {(route.name, version) for route in routes for version, _ in route.versions}

    def _only_route(self) -> ModelRoute:
        models = self.models()
        if len(models) > 1:
            raise BadRequest(
                f"Name a model: several are served here. There is: {self._listed()}.",
                param="model",
            )
        return plain_route(next(iter(models), ""))

    def _listed(self) -> str:
        """Returns names that clients may use: of many the models first, and then adapters."""
        rules = self.rules
        names = sorted({*self.served, *self.expected, *rules.aliases, *rules.splits})
        adapters = (name for name in self.adapters if name not in names)
        names += sorted(islice(adapters, max(0, _MAX_LISTED + 1 - len(names))))
        listed = ", ".join(map(repr, names[:_MAX_LISTED]))
        return listed if len(names) <= _MAX_LISTED else f"{listed} and more, see /v1/models"


@dataclass(slots=True, kw_only=True)
class KnownModels:
    """Makes the table. `remember_s`: seconds in which a model is expected to come back."""

    registry: NodeRegistry
    rules: RulesFile
    remember_s: float = 600.0
    _table: ModelTable = field(init=False)
    _made_of: tuple[int, int] = (-1, -1)
    _made_at: float = 0.0
    _last_seen: dict[str, float] = field(default_factory=dict)
    _joined_at: dict[NodeAddress, float] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)
    _hidden: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._table = ModelTable(rules=self.rules.rules, served={})

    @property
    def table(self) -> ModelTable:
        """Returns the state of things."""
        made_of = (self.registry.version, self.rules.version)
        if made_of != self._made_of or self._has_aged():
            self._made_of = made_of
            self._make()
        return self._table

    def num_computing(self, model: str) -> int:
        """Returns the nodes that compute prompts of `model`: its prefill nodes, or without one its
        decode nodes."""
        _ = self.table
        return self._counts.get(model, 0)

    def _has_aged(self) -> bool:
        """Returns whether time alone may have changed something."""
        waits = self._table.is_settling or self._table.expected
        return bool(waits) and self.registry.clock() - self._made_at > 1.0

    def _make(self) -> None:
        registry, rules = self.registry, self.rules.rules
        now = self._made_at = registry.clock()
        decodes = registry.nodes(NodeRole.DECODE)
        served = served_names(node.report for node in decodes if node.report is not None)
        self._last_seen |= dict.fromkeys(served.values(), now)
        self._last_seen = {
            name: seen for name, seen in self._last_seen.items() if now - seen < self.remember_s
        }
        have = Counter((node.adapters, node.model) for node in decodes)
        calls = registry.adapters.of_models({*served.values(), *self._last_seen})
        adapters = AdapterNames(have, calls)
        expected = {
            name
            for name in (*rules.targets(), *self._last_seen)
            if name not in served and name not in adapters
        }
        self._table = ModelTable(
            rules=rules,
            served=served,
            expected=expected,
            adapters=adapters,
            max_model_lens=max_model_lens(node.report for node in decodes if node.report),
            is_settling=self._is_settling(decodes, now),
        )
        self._counts = num_computing(decodes, registry.nodes(NodeRole.PREFILL))
        self._warn_hidden(rules.hidden(served))

    def _is_settling(self, decodes: list[Node], now: float) -> bool:
        """Returns whether a node that is a member for a short time has not reported yet."""
        silent = [node.address for node in decodes if node.report is None]
        self._joined_at = {address: self._joined_at.get(address, now) for address in silent}
        patience_s = self.registry.patience.down_after_s
        return any(now - joined < patience_s for joined in self._joined_at.values())

    def _warn_hidden(self, hidden: set[str]) -> None:
        for name in sorted(hidden - self._hidden):
            logger.warning(
                "nodes serve a model as %r, which the model rules lead elsewhere: no client "
                "reaches it by that name",
                name,
            )
        self._hidden = hidden


def served_names(reports: Iterable[NodeReport]) -> dict[str, str]:
    """Returns every name, and the model it stands for. A model's first name is never another's
    alias; of one alias for two models all routers make the same."""
    known = sorted({(report.model_name, report.model_aliases) for report in reports})
    aliases = {alias: model for model, others in known for alias in others}
    return aliases | {model: model for model, _ in known if model}


def max_model_lens(reports: Iterable[NodeReport]) -> dict[str, int]:
    """Returns the length of each model of which a node has said it."""
    longest: dict[str, int] = {}
    for report in reports:
        if report.max_model_len:
            model = report.model_name
            longest[model] = max(longest.get(model, 0), report.max_model_len)
    return longest


def num_computing(decodes: Iterable[Node], prefills: Sequence[Node]) -> dict[str, int]:
    """Returns the number of nodes that compute prompts, by model."""
    by_model: defaultdict[str, list[Node]] = defaultdict(list)
    for decode in decodes:
        if decode.report is not None:
            by_model[decode.report.model_name].append(decode)
    groups = by_weights(prefills)
    counts = {}
    for model, nodes in by_model.items():
        counts[model] = len(partners_of_all(nodes, groups)) or len(nodes)
    return counts
