"""Says which model serves a request, and which of its versions.

A split gives each version a weight. Which one a session gets follows from a hash of both, so all
routers agree without a word, and from run to run. With weighted rendezvous hashing

    score(version) = weight / -ln(hash(version, session)),      hash in (0, 1)

the highest score wins: each version wins its share, and a session goes from one version to another
only when the weight of the second has grown against that of the first. Where 10 of 100 become 20,
nothing leaves the version that grew. (Schindelhauer and Schomaker, Weighted Distributed Hash
Tables, SPAA 2005.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Leads a name that a client asked for to what nodes serve.

    Attributes:
        name: The model, whatever alias the client used; "" when it named none.
        versions: Names by which nodes serve it, with their weights.
        adapter: The adapter of the model that is asked for; "": none.
        adapter_digest: What it is.
    """

    name: str
    versions: tuple[tuple[str, float], ...]
    adapter: str = ""
    adapter_digest: str = ""

    def version(self, key: bytes) -> str:
        """Returns the version that a session gets, or a request without one. `key` is 16 bytes for
        a session, anything that tells requests apart otherwise."""
        if len(self.versions) == 1:
            return self.versions[0][0]
        return max(self.versions, key=lambda entry: _score(entry[0], entry[1], key))[0]


def _score(version: str, weight: float, key: bytes) -> float:
    digest = xxhash.xxh3_64_intdigest(b"version\0%b\0%b" % (version.encode(), key))
    # Of more bits the largest would be rounded to 1, whose logarithm is 0.
    return -weight / math.log(((digest >> 12) + 0.5) / 2.0**52)


def plain_route(name: str) -> ModelRoute:
    """Returns the route to a model that is served by this name; "" is any."""
    return ModelRoute(name, ((name, 1.0),))
