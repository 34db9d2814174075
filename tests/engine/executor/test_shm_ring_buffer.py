"""The ring alone, in one process: every order of writes and reads gives what a list would."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.executor.queues.shm_broadcast import Place, RingError, ShmRingBuffer

SLOT_BYTES = 64


def _ring(num_readers: int, num_slots: int) -> ShmRingBuffer:
    return ShmRingBuffer.create("test", num_readers, num_slots, SLOT_BYTES)


@settings(deadline=None)
@given(
    num_readers=st.integers(1, 3),
    num_slots=st.integers(1, 4),
    actions=st.lists(
        st.one_of(st.binary(max_size=SLOT_BYTES), st.integers(0, 2)), min_size=1, max_size=80
    ),
)
def test_any_order_of_writes_and_reads_equals_a_list(
    num_readers: int, num_slots: int, actions: list[bytes | int]
) -> None:
    """Compares with a list; bytes are written, and a number names the reader that reads."""
    writer = _ring(num_readers, num_slots)
    readers = [ShmRingBuffer.attach(writer.handle) for _ in range(num_readers)]
    written: list[bytes] = []
    num_read = [0] * num_readers
    for action in actions:
        if isinstance(action, bytes):
            sequence = len(written) + 1
            is_full = len(written) - min(num_read) >= num_slots
            assert (writer.slowest_reader(sequence) is not None) == is_full
            if not is_full:
                writer.publish(sequence, action, Place.SLOT)
                written.append(action)
        elif action < num_readers:
            sequence = num_read[action] + 1
            found = readers[action].read(sequence)
            if num_read[action] == len(written):
                assert found is None
            else:
                assert found == (written[num_read[action]], Place.SLOT)
                readers[action].acknowledge(action, sequence)
                num_read[action] += 1
    for ring in (writer, *readers):
        ring.close()


def test_sequence_numbers_pass_two_to_the_thirty_two() -> None:
    ring = _ring(1, 2)
    start = (1 << 32) - 3
    ring.acknowledge(0, start)
    for sequence in range(start + 1, start + 9):
        assert ring.slowest_reader(sequence) is None
        ring.publish(sequence, b"%d" % sequence, Place.SLOT)
        assert ring.num_unread(0, sequence) == 1
        assert ring.read(sequence) == (b"%d" % sequence, Place.SLOT)
        ring.acknowledge(0, sequence)
    ring.close()


def test_reader_that_missed_messages_is_told() -> None:
    ring = _ring(1, 2)
    for sequence in (1, 2, 3):
        ring.publish(sequence, b"x", Place.SLOT)
    with pytest.raises(RingError, match="expected message 1, found 3"):
        ring.read(1)
    ring.close()


def test_half_written_message_is_not_seen() -> None:
    """A payload that changed after its checksum stands for one that is not wholly visible."""
    ring = _ring(1, 2)
    ring.publish(1, b"whole", Place.SLOT)
    ring._payloads[1][0] ^= 1
    assert ring.read(1) is None
    ring._payloads[1][0] ^= 1
    assert ring.read(1) == (b"whole", Place.SLOT)
    ring.close()


@pytest.mark.parametrize(("readers", "slots", "slot_bytes"), [(0, 1, 8), (1, 0, 8), (1, 1, 12)])
def test_impossible_shapes_are_refused(readers: int, slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="a ring needs"):
        ShmRingBuffer.create("test", readers, slots, slot_bytes)
