import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from scripts import _examples


def write_png(path, pixels):
    with tf.Graph().as_default(), tf.Session() as session:
        path.write_bytes(session.run(tf.io.encode_png(pixels)))


def test_examples_come_from_files_of_each_kind_in_their_order(tmp_path):
    np.savez(tmp_path / 'a.npz', image=np.arange(4).reshape(2, 2), label=np.arange(2))
    np.save(tmp_path / 'b.npy', np.arange(3))
    (tmp_path / 'c.jsonl').write_text(json.dumps({'image': [1, 2]}) + '\n' + json.dumps({'image': [3, 4]}) + '\n')
    write_png(tmp_path / 'd.png', np.uint8([[[0], [51]], [[255], [102]]]))
    found = list(_examples.read([str(tmp_path / name) for name in ('a.npz', 'b.npy', 'c.jsonl', 'd.png')], 'image'))
    images = [np.asarray(example['image']).tolist() for example in found]
    assert images[:-1] == [[0, 1], [2, 3], 0, 1, 2, [1, 2], [3, 4]]
    np.testing.assert_allclose(images[-1], [[[0], [0.2]], [[1], [0.4]]], rtol=1e-6)
    assert [example.get('label') for example in found[:2]] == [0, 1]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('a.txt', b'', 'expected one of .npz, .npy, .jsonl, .png'),
        ('a.npz', b'PK no zip', 'can not be read'),
        ('a.npy', b'', 'can not be read'),
        ('a.png', b'\x89PNG', 'can not be read'),
        ('a.jsonl', b'{"x": 1}\n{', 'line 2 is no JSON'),
        ('a.jsonl', b'[1]\n', 'line 1 must be an object of features'),
    ],
)
def test_a_file_that_is_damaged_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        list(_examples.read([str(tmp_path / name)], 'image'))
    assert name in str(error.value)


def test_arrays_of_other_lengths_are_refused(tmp_path):
    np.savez(tmp_path / 'a.npz', image=np.zeros((2, 2)), label=np.zeros(3))
    with pytest.raises(ValueError, match='the first axis of all arrays must be the example'):
        list(_examples.read([str(tmp_path / 'a.npz')], 'image'))


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match='--files=none.npz: there is no such file'):
        list(_examples.read(['none.npz'], 'image'))
