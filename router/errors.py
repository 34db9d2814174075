"""Adds the router's own to the errors that every HTTP service has (`edge.http.errors`).

    HttpError                       answered to the client with an OpenAI error body
      ModelNotFound         404     no node serves the model
      AdminOnly             403     it changes the cluster, and a client asked
      RateLimited           429     the tenant has used up what it may use
      Overloaded            503     too many requests in flight
      NoNodeAvailable       503     nothing to serve it now
    NodeUnreachable                 no connection to a node: nothing was sent
    NodeLost                        the connection to a node broke
      PathUnknown                   a node is well, but does not serve this path
    ConfigurationError              the router cannot start

The first group is the client's to read; the others never leave the router.
"""

from __future__ import annotations

from http import HTTPStatus

from edge.http.errors import HttpError


class ModelNotFound(HttpError):
    status = HTTPStatus.NOT_FOUND
    type = "invalid_request_error"
    default_code = "model_not_found"
    default_param = "model"


class AdminOnly(HttpError):
    status = HTTPStatus.FORBIDDEN
    type = "permission_error"
    default_code = "permission_denied"


class NodesRefused(HttpError):
    """Nodes could not do what an operator asks of all of them."""

    status = HTTPStatus.BAD_REQUEST
    type = "invalid_request_error"
    default_code = "nodes_refused"


class NodesAway(HttpError):
    """Nodes that an operator's call needs do not answer now; it may be made again."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "nodes_away"
    default_retry_after_s = 5


class RateLimited(HttpError):
    status = HTTPStatus.TOO_MANY_REQUESTS
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"
    default_retry_after_s = 1


class Overloaded(HttpError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "overloaded"
    default_retry_after_s = 1


class NoNodeAvailable(HttpError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    type = "service_unavailable"
    default_code = "no_node_available"
    default_retry_after_s = 2


class NodeUnreachable(Exception):
    """No connection to a node could be made, so nothing was sent to it."""


class NodeLost(Exception):
    """The connection to a node broke while an answer was awaited or read."""


class PathUnknown(NodeLost):
    """A node answered that it does not serve the path."""


class ConfigurationError(Exception):
    """A setting cannot be used. The message names it and says what to write."""
