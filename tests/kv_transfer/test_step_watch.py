"""Marks of layers are never believed too early, and are seen without a message for each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.metadata import StepProgress
from kv_transfer.producer.layer_marks import LayerMarks
from kv_transfer.producer.step_watch import StepWatch

LAYERS = 4


@pytest.fixture
def marks() -> Iterator[LayerMarks]:
    marks = LayerMarks.create(LAYERS)
    yield marks
    marks.close()


@settings(deadline=None)
@given(
    st.integers(0, 1 << 40),
    st.integers(0, 3),
    st.integers(1, LAYERS),
    st.integers(-1000, 1000),
)
def test_progress_is_what_was_marked(first: int, steps: int, layers: int, off: int) -> None:
    marks = LayerMarks.create(LAYERS)
    assert marks.progress(first) is None
    for step in range(first, first + steps):
        for layer in range(LAYERS):
            marks.write(step, layer)
    for layer in range(layers):
        marks.write(first + steps, layer)
    if (first + steps + 1) % (1 << 32) != 0:
        near = max(0, first + off)
        assert marks.progress(near) == StepProgress(first + steps, layers)
    marks.close()


def test_another_mapping_sees_the_marks(marks: LayerMarks) -> None:
    other = LayerMarks.attach(os.getpid(), marks.fd, LAYERS)
    marks.write(7, 0)
    assert other.progress(7) == StepProgress(7, 1)
    other.close()


def test_a_message_for_each_layer_needs_no_looking(marks: LayerMarks) -> None:
    heard: list[StepProgress] = []
    watch = StepWatch(marks, LAYERS, False, heard.append)
    for layer in range(LAYERS):
        marks.write(3, layer)
        watch.handle(StepProgress(3, layer + 1))
    assert heard == [StepProgress(3, layer + 1) for layer in range(LAYERS)]


def test_marks_that_come_later_are_seen_without_messages(marks: LayerMarks) -> None:
    """As on a GPU: the message comes when nothing has been computed yet."""

    async def run() -> None:
        heard: list[StepProgress] = []
        news = asyncio.Event()

        def hear(progress: StepProgress) -> None:
            if not heard or heard[-1] != progress:
                heard.append(progress)
                news.set()

        watch = StepWatch(marks, LAYERS, True, hear)
        watch.handle(StepProgress(5, 0))
        watch.handle(StepProgress(6, 0))
        expected = []
        for step in (5, 6):
            for layer in range(LAYERS):
                assert heard == expected
                marks.write(step, layer)
                await asyncio.wait_for(news.wait(), 60)
                news.clear()
                expected.append(StepProgress(step, layer + 1))
                assert heard == expected
        watch.close()

    asyncio.run(run())
