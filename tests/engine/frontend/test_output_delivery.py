"""Each request gets what steps bring in order, and nothing waits for the end of a large step."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.http.event_loop import long_work
from engine.contracts.messages import EngineCoreOutput
from engine.contracts.outputs import PromptLogprobs, TokenLogprobs
from engine.frontend import output_delivery
from engine.frontend.output_delivery import Delivered, OutputDelivery


class Taken:
    """Keeps what was delivered."""

    def __init__(self) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.messages: list[Delivered] = []
        self.delivery = OutputDelivery(self.outputs.append, self.messages.append)

    def take(self, outputs: list[EngineCoreOutput], sent_at: float = 0.0) -> None:
        self.delivery.take(outputs, sent_at)

    @property
    def names(self) -> list[str]:
        return [output.request_id for output in self.outputs]


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every slice is over after one output."""
    monkeypatch.setattr(output_delivery, "_SLICE_S", -1.0)


def first(name: str, token: int = 1) -> EngineCoreOutput:
    return EngineCoreOutput(name, [token], num_cached_tokens=0)


async def until_delivered(taken: Taken) -> None:
    while taken.delivery._is_scheduled:
        await asyncio.sleep(0)


async def test_first_tokens_come_before_others() -> None:
    taken = Taken()
    taken.take([EngineCoreOutput("a", [5]), first("b"), EngineCoreOutput("c", [6])])
    await until_delivered(taken)
    assert taken.names == ["b", "a", "c"]


@pytest.mark.usefixtures("no_time")
async def test_garbage_is_collected_when_all_of_a_step_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken, num_sent = Taken(), list[int]()
    monkeypatch.setattr(
        output_delivery, "collect_early", lambda: num_sent.append(len(taken.outputs))
    )
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(3)])
    await until_delivered(taken)
    assert not num_sent, "what has waited for the step comes first"
    await asyncio.sleep(0)
    assert num_sent == [3]


@pytest.mark.usefixtures("no_time")
async def test_work_on_requests_begins_behind_the_last_slice_of_a_step() -> None:
    taken, num_before = Taken(), list[int]()

    async def work() -> None:
        await long_work.pause()
        num_before.append(len(taken.outputs))

    tasks = [asyncio.create_task(work()) for _ in range(3)]
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(8)])
    await asyncio.gather(*tasks)
    assert num_before == [8, 8, 8]


@pytest.mark.usefixtures("no_time")
async def test_an_output_that_cannot_be_delivered_holds_up_nothing() -> None:
    delivered, failures = list[str](), list[object]()

    def deliver(output: EngineCoreOutput) -> None:
        if output.request_id == "bad":
            raise ValueError("bad")
        delivered.append(output.request_id)

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    delivery = OutputDelivery(deliver, lambda message: None)
    delivery.take([EngineCoreOutput(name, [1]) for name in ("a", "bad", "b")], 0.0)
    work = asyncio.create_task(long_work.pause())
    async with asyncio.timeout(60):
        await work
    assert delivered == ["a", "b"]
    assert [type(one) for one in failures] == [ValueError]


@pytest.mark.usefixtures("no_time")
async def test_a_node_that_falls_behind_still_works_on_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output_delivery, "_HOLD_S", 0.0)
    taken = Taken()
    work = asyncio.create_task(long_work.pause())
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(50)])
    await work
    assert len(taken.outputs) < 50
    await until_delivered(taken)


@pytest.mark.usefixtures("no_time")
async def test_what_comes_meanwhile_does_not_wait_for_the_end_of_a_step() -> None:
    taken = Taken()
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(5)])
    assert taken.names == ["0"]
    await asyncio.sleep(0)
    taken.take([first("new")])
    await asyncio.sleep(0)
    assert taken.names == ["0", "1", "new"]
    await until_delivered(taken)
    assert taken.names == ["0", "1", "new", "2", "3", "4"]


@pytest.mark.usefixtures("no_time")
async def test_who_is_behind_gets_several_steps_in_one_output() -> None:
    taken, logprobs = Taken(), [[TokenLogprobs([i], [-0.5], 1)] for i in range(3)]
    taken.take([EngineCoreOutput(n, [0], logprobs=logprobs[0]) for n in ("a", "b")])
    taken.take([EngineCoreOutput("b", [1], logprobs=logprobs[1])])
    taken.take([EngineCoreOutput("b", [2], "stop", 2, logprobs=logprobs[2])])
    await until_delivered(taken)
    assert taken.names == ["a", "b"]
    last = taken.outputs[-1]
    assert (last.new_token_ids, last.finish_reason, last.stop_reason) == ([0, 1, 2], "stop", 2)
    assert last.logprobs == [*logprobs[0], *logprobs[1], *logprobs[2]]


@pytest.mark.usefixtures("no_time")
async def test_an_end_without_a_token_hides_none() -> None:
    """The last token of an output that ends with `stop` has no text."""
    taken = Taken()
    taken.take([EngineCoreOutput("z", [9]), EngineCoreOutput("a", [1])])
    taken.take([EngineCoreOutput("a", [], "stop")])
    await until_delivered(taken)
    ends = [(one.new_token_ids, one.finish_reason) for one in taken.outputs[1:]]
    assert ends == [([1], ""), ([], "stop")]


@pytest.mark.usefixtures("no_time")
async def test_what_precedes_a_first_token_is_never_behind_it() -> None:
    taken = Taken()
    part = PromptLogprobs(1, 0, b"", b"", b"")
    placed = EngineCoreOutput("b", [], group=1)
    about = EngineCoreOutput("b", [], prompt_logprobs=part)
    taken.take([EngineCoreOutput("a", [5]), placed, about, first("b")])
    await until_delivered(taken)
    assert [one for one in taken.outputs if one.request_id == "b"][:2] == [placed, about]


@pytest.mark.usefixtures("no_time")
async def test_the_end_of_the_engine_leaves_nothing_behind() -> None:
    taken = Taken()
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(5)])
    taken.delivery.flush()
    assert len(taken.outputs) == 5
    await until_delivered(taken)
    assert len(taken.outputs) == 5


@pytest.mark.usefixtures("no_time")
async def test_a_message_is_noted_behind_its_last_output() -> None:
    taken = Taken()
    began = time.monotonic()
    taken.take([EngineCoreOutput(str(i), [i]) for i in range(3)], sent_at=began - 1)
    taken.take([], sent_at=began - 2)
    taken.take([EngineCoreOutput("late", [1])], sent_at=began - 3)
    assert not taken.messages
    await until_delivered(taken)
    assert [message.sent_at for message in taken.messages] == [began - 1, began - 3]
    for message in taken.messages:
        assert began <= message.received_at <= message.written_at <= time.monotonic()


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True, max_size=4), max_size=8))
def test_each_request_gets_all_its_tokens_in_order(steps: list[list[str]]) -> None:
    async def run() -> None:
        taken = Taken()
        numbers = {name: itertools.count() for name in "abcd"}
        sent: dict[str, list[int]] = {name: [] for name in "abcd"}
        for step in steps:
            outputs = []
            for name in step:
                token = next(numbers[name])
                make = first if token == 0 else lambda name, token: EngineCoreOutput(name, [token])
                outputs.append(make(name, token))
                sent[name].append(token)
            taken.take(outputs)
            if len(step) % 2:
                await asyncio.sleep(0)
        await until_delivered(taken)
        got: dict[str, list[int]] = {name: [] for name in "abcd"}
        for output in taken.outputs:
            got[output.request_id] += output.new_token_ids
        assert got == sent

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_delivery, "_SLICE_S", -1.0)
        asyncio.run(run())
