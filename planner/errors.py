"""Says what is wrong with what a plan is asked to work from."""

from __future__ import annotations


class PlanError(Exception):
    """A plan cannot be made; the message says what is wrong, where, and what to do."""


class TraceError(PlanError):
    """A trace cannot be read; the message begins with its name and the line."""


class TrafficError(PlanError):
    """A description of traffic makes no sense."""


class MetricsError(PlanError):
    """The metrics of a running cluster cannot be had, or do not tell what is needed."""


class NoPlan(PlanError):
    """No number of nodes that may be used meets the objectives."""
