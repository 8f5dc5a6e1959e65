"""The frame of TFRecord files: what TensorFlow's writer wrote is found, and each kind of damage by its record."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from models.data import framing

SIZES = (0, 1, 3, 4, 7, 300, 5, 70_000, 64)


@pytest.fixture
def written(tmp_path):
    """A file of records of SIZES, and what they hold."""
    random = np.random.default_rng(3)
    records = [random.bytes(size) for size in SIZES]
    with tf.io.TFRecordWriter(str(tmp_path / 'some.tfrecord')) as writer:
        for record in records:
            writer.write(record)
    return tmp_path / 'some.tfrecord', records


def begin(number):
    """The first byte of a record's header."""
    return sum(size + 16 for size in SIZES[:number])


def edit(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content) or content))


def flip(place, bit=0):
    def change(content):
        content[place] ^= 1 << bit

    return change


def read(path):
    frames = framing.read(path)
    return frames, list(framing.contents(path, frames))


def test_the_checksum_is_crc_32c():
    rows = [np.frombuffer(text, np.uint8) for text in (b'123456789', b'', b'1', b'a' * 32)]
    # The check value of CRC-32C in the catalogue of parametrised CRC algorithms, and RFC 3720 B.4: 32 bytes of zeros.
    assert framing.checksums(rows)[:2].tolist() == [0xE3069283, 0]
    assert framing.checksums([np.zeros(32, np.uint8), np.full(32, 255, np.uint8)]).tolist() == [0x8A9136AA, 0x62A8AB43]


def test_every_record_of_a_whole_file_is_found(written):
    path, records = written
    frames, found = read(path)
    assert found == records and frames.damaged == {}
    assert frames.offsets.tolist() == [begin(number) for number in range(len(SIZES))]
    assert (frames.lengths.tolist(), frames.numbers.tolist()) == (list(SIZES), list(range(len(SIZES))))


@pytest.mark.parametrize('number', [1, 4, 5, 7])
@pytest.mark.parametrize('part', ['data', 'checksum'])
def test_a_flipped_bit_in_what_a_record_holds_costs_that_record(written, number, part):
    path, records = written
    edit(path, flip(begin(number) + 12 + (SIZES[number] // 2 if part == 'data' else SIZES[number] + 1), bit=5))
    frames, found = read(path)
    assert frames.damaged == {}
    assert found == [None if place == number else record for place, record in enumerate(records)]


@pytest.mark.parametrize('number', [0, 5, 7])
@pytest.mark.parametrize('byte', [0, 3, 7, 9])
def test_a_flipped_bit_in_a_header_costs_that_record(written, number, byte):
    path, records = written
    edit(path, flip(begin(number) + byte, bit=6))
    frames, found = read(path)
    assert frames.damaged == {number: f'its length, at byte {begin(number)}, does not match its checksum'}
    assert found == records[:number] + records[number + 1 :]
    assert frames.numbers.tolist() == [place for place in range(len(SIZES)) if place != number]


def test_a_hole_costs_what_lies_in_it_and_counts_as_one(written, monkeypatch):
    monkeypatch.setattr(framing, '_SEARCHED', 1000)  # the search goes on from part to part
    path, records = written

    def erase(content):
        content[begin(6) : begin(7) + 100] = bytes(begin(7) + 100 - begin(6))

    edit(path, erase)
    frames, found = read(path)
    assert list(frames.damaged) == [6] and found == records[:6] + records[8:]


@pytest.mark.parametrize('left', [1, 11, 12, 20, 70_000])
def test_a_cut_file_loses_its_last_record(written, left):
    path, records = written
    edit(path, lambda content: content[: begin(7) + left])
    frames, found = read(path)
    assert frames.damaged == {7: f'it is cut: it begins at byte {begin(7)} and the file ends at byte {begin(7) + left}'}
    assert found == records[:7]


def test_an_empty_file_is_damaged(tmp_path):
    path = tmp_path / 'none.tfrecord'
    path.write_bytes(b'')
    frames, found = read(path)
    assert (frames.damaged, found, len(frames.offsets)) == ({0: 'the file is empty'}, [], 0)


def test_damage_of_several_kinds_in_one_file_is_told_apart(written, monkeypatch):
    monkeypatch.setattr(framing, '_CHECKED', 100)  # records are checked in several parts
    path, records = written
    edit(path, flip(begin(2) + 1))
    edit(path, flip(begin(5) + 12 + 7))
    edit(path, lambda content: content[:-1])
    frames, found = read(path)
    assert list(frames.damaged) == [2, 8]
    assert found == [*records[:2], *records[3:5], None, *records[6:8]]
