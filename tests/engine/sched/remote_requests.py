"""Requests whose KV comes from another node, and what happens to it, step by step."""

from __future__ import annotations

from engine.contracts.request import Request, RequestStatus
from tests.engine.sched.factories import make_request, remote_prefill
from tests.engine.sched.step_machine import Client, StepMachine


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(5 * i + 11 + salt) % 60 + 1 for i in range(length)]


def pulled(name: str, length: int = 10, **more: object) -> Request:
    return make_request(name, prompt(length, ord(name[0])), kv=remote_prefill(f"t-{name}"), **more)


def add_and_ask(machine: StepMachine, request: Request) -> Client:
    """Adds the request, so that its pull has begun."""
    client = machine.add(request)
    machine.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert f"t-{request.request_id}" in machine.connector.pulls
    return client


def receive(machine: StepMachine, name: str) -> None:
    machine.connector.finish(f"t-{name}")
    machine.poll_connector()


def finish(machine: StepMachine) -> None:
    machine.finish()
    machine.check_all_done()
