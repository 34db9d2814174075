"""Reads the command line of `tandem up` as people type it who know vLLM.

    tandem serve MODEL --tensor-parallel-size 2 --max-model-len 4096 --api-key secret
                       └ a setting of the cluster └ a flag of the nodes   └ the router's

1. other names of the cluster's own settings become ours
2. flags that are not the cluster's are the nodes'; those behind `--` always
3. of these, what every engine has goes to all nodes, and everything else to decode nodes, which
   serve the API, and to those that may become one; one of them says what it does not know (`check`)
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from cli.local_cluster.cluster import UpSettings
from cli.local_cluster.service_checks import refusal
from edge.command_line import flags_of
from engine.node.settings.engine_settings import EngineSettings

_OTHER_NAMES = {"--tensor-parallel-size": "--tp", "-tp": "--tp"}
_MODEL = "--model"
_VALUE = re.compile(r"(?!--?[A-Za-z]).*", re.DOTALL)
"""Negative numbers are values, too."""


class UsageError(Exception):
    """The command line cannot be meant so. The message is one line."""


@dataclass(frozen=True, slots=True)
class NodeArgs:
    """Holds the flags of nodes: `common` ones, and those of nodes that decode."""

    common: list[str] = field(default_factory=list)
    decode: list[str] = field(default_factory=list)

    async def check(self, are_switchable: bool = False) -> None:
        """Asks a node whether it knows its flags: a decode node, or one that changes its role,
        which knows the same but has not all that they ask for. Raises `UsageError`."""
        if not self.common and not self.decode:
            return
        flags = (*self.common, *self.decode)
        module = "role_node" if are_switchable else "decode_node"
        if said := await refusal((sys.executable, "-m", module, "--model", "any", *flags)):
            raise UsageError(_nearest_own(self.decode) or said)


def _nearest_own(flags: Sequence[str]) -> str:
    """Returns what to say if one of `flags` is nearly a flag of the cluster's."""
    known = sorted(flags_of(UpSettings))
    for flag in flags:
        if flag.startswith("-") and (near := difflib.get_close_matches(flag, known, 1, 0.8)):
            return f"there is no {flag}; did you mean {near[0]}?"
    return ""


def read_args(args: Sequence[str]) -> tuple[list[str], NodeArgs]:
    """Returns the arguments of `UpSettings`, and those of the nodes. Raises `UsageError`."""
    at = args.index("--") if "--" in args else len(args)
    own, model, models, nodes = list[str](), list[str](), list[str](), NodeArgs()
    known = flags_of(UpSettings) | {"-h"}
    for option in _options(args[:at]):
        given, *rest = option
        name = _OTHER_NAMES.get(given, given)
        if name == _MODEL:
            model = rest
        elif not name.startswith("-"):
            models.append(name)
        elif name in known:
            own += [name, *rest]
        else:
            _give(nodes, option)
    for option in _options(args[at + 1 :]):
        _give(nodes, option)
    models = [*model, *models]
    if len(models) > 1:
        raise UsageError(
            f"it starts nodes of one model, and {', '.join(models)} are {len(models)}; start nodes "
            "of several models by tandem prefill and tandem decode, and give one router all of "
            "them (docs/routing.md, Several models)"
        )
    return [*models, *own], nodes


def _options(args: Sequence[str]) -> list[list[str]]:
    """Splits arguments into flags with their values, and lone values."""
    found: list[list[str]] = []
    for arg in args:
        if arg.startswith("-") and not _VALUE.fullmatch(arg):
            flag, *value = arg.split("=", 1)
            found.append([flag, *value])
        elif found and found[-1][0].startswith("-") and not _is_complete(found[-1]):
            found[-1].append(arg)
        else:
            found.append([arg])
    return found


def _is_complete(option: list[str]) -> bool:
    """Says whether a flag takes no further value."""
    if len(option) > 1:
        return True
    name = option[0].removeprefix("--").removeprefix("no-").replace("-", "_")
    fields = {**EngineSettings.model_fields, **UpSettings.model_fields}
    return name in fields and fields[name].annotation is bool


def _give(nodes: NodeArgs, option: list[str]) -> None:
    target = nodes.common if option[0] in flags_of(EngineSettings) else nodes.decode
    target += option
