"""What TensorFlow writes of functions that it converts: nothing of ours, and of a user's, which work as in plain tf.data, nothing stays."""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = """
    import glob, os, pathlib, sys, tempfile
    import tensorflow.compat.v1 as tf
    import dataset_files, towers
    from models.data import digits, images, synthetic, tfrecord
    from towers.run import signals

    def model(batch, *, training):
        mean = tf.reduce_mean(tf.cast(batch['image'] if isinstance(batch, dict) else batch, tf.float32))
        return towers.ModelOutput(mean * tf.get_variable('w', []), metrics={'mean': mean})

    def users():
        def halved(number):
            if tf.equal(number % 2, 0):  # of a tensor
                return number // 2
            return number
        return tf.data.Dataset.range(6).map(halved)

    def converted():
        return len(glob.glob(os.path.join(tempfile.gettempdir(), '__autograph_generated_file*')))

    def train(dataset, eval_dataset=None, input_pipeline='global'):
        settings = {'train_steps': 2, 'global_batch_size': 3, 'num_gpus': 2, 'device': 'cpu', 'intra_op_threads': 1}
        return towers.train(model, dataset, towers.Config(**settings, input_pipeline=input_pipeline), eval_dataset=eval_dataset)

    folder = pathlib.Path(sys.argv[1])
    dataset_files.write_images(folder / 'images')
    dataset_files.write_tfrecord(folder / 'records')
    train(digits.load().train)
    train(synthetic.load().train, input_pipeline='sharded')
    train(images.load(str(folder / 'images')).train)
    train(tfrecord.load(str(folder / 'records')).train)
    ours = converted()
    result = train(users, eval_dataset=users)
    print('FOUND', ours, converted() > 0, result.evaluation['mean'], flush=True)
    signals.leave(7)
"""


def test_only_users_functions_are_converted_and_what_is_written_of_them_does_not_stay(tmp_path):
    (tmp_path / 'program.py').write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests')]), 'TMPDIR': str(tmp_path)}
    command = [sys.executable, str(tmp_path / 'program.py'), str(tmp_path / 'data')]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 7, done.stderr
    assert re.search(r'^FOUND (.*)$', done.stdout, re.MULTILINE)[1] == '0 True 2.0'
    assert list(tmp_path.glob('__autograph_generated_file*')) == []
