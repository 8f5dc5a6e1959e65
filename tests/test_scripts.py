import contextlib
import os
import pathlib
import queue
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from scripts import _main, _start, _tensorboard

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(*arguments, cwd=ROOT, timeout=120):
    environment = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


def test_help_is_grouped_and_the_start_is_quiet(tmp_path):
    done = run(ROOT / 'scripts' / 'train.py', '--help', cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.index('Devices: where') < done.stdout.index('--num_gpus=1') < done.stdout.index('Reports: ')


def test_wrong_use_is_one_line_and_exit_2_and_verbose_shows_the_start():
    done = run('scripts/train.py', '--verbose', '--num_gpu=4')
    *noise, message = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, '')
    assert message == "Unknown command line flag 'num_gpu'. Did you mean: num_gpus? --help lists the flags."
    assert noise


def test_a_python_without_tensorflow_is_told_what_to_run(tmp_path):
    done = run('-S', '-E', '-P', ROOT / 'scripts' / 'train.py', cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ''
    assert done.stderr == f'TensorFlow is not installed for {sys.executable}; run: {sys.executable} -m pip install -e {ROOT}\n'


OWN = """
import numpy as np
import tensorflow.compat.v1 as tf
import towers
from models import LABELS


def model(batch, *, training, width):
    table = tf.get_variable('table', [6, width])
    frozen = tf.get_variable('frozen', [width, LABELS], trainable=False)
    logits = tf.matmul(tf.nn.embedding_lookup(table, batch['id']), frozen)
    loss = tf.losses.sparse_softmax_cross_entropy(batch['label'], logits)
    return towers.ModelOutput(loss, metrics={'accuracy': towers.accuracy(batch['label'], logits)})


def examples():
    return tf.data.Dataset.from_tensor_slices({'id': np.arange(6), 'label': np.arange(6) % LABELS})
"""


def test_a_users_model_and_data_in_a_folder_named_like_the_zoo_train_resume_and_are_evaluated_from_elsewhere(tmp_path):
    for folder in ('models', 'scripts', 'tests'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / '__init__.py').write_text('LABELS = 2\n' if folder == 'models' else 'raise RuntimeError\n')
    (tmp_path / 'models' / 'net.py').write_text(OWN)
    what = ['--model=models.net:model', '--model_args=width=4', '--dataset=models.net:examples', '--eval_dataset=models.net:examples']
    command = [ROOT / 'scripts' / 'train.py', *what, '--num_gpus=2', '--global_batch_size=4', '--train_steps=3', '--device=cpu']
    model_dir = 'runs/models.net.model-models.net.examples'
    first = run(*command, '--evaluate', cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert '2 towers on CPU devices as fake GPUs, as --device=cpu asks.' in first.stderr.splitlines()[0]
    rows = dict(line.split(None, 2)[0::2] for line in first.stdout.splitlines() if line.startswith(('test ', 'run ')))
    assert set(rows) == {'test', 'run'} and rows['run'] == model_dir
    assert 'steps          3 (3 in this run)' in first.stdout.splitlines()
    again = run(*command, cwd=tmp_path)
    assert (again.returncode, 'steps          3 (0 in this run)' in again.stdout.splitlines()) == (0, True)
    elsewhere = tmp_path / 'elsewhere'
    (elsewhere / 'models').mkdir(parents=True)
    (elsewhere / 'models' / 'net.py').write_text('raise RuntimeError\n')  # not the run's
    evaluation = run(ROOT / 'scripts' / 'evaluate.py', f'--model_dir={tmp_path / model_dir}', cwd=elsewhere)
    assert evaluation.returncode == 0, evaluation.stderr
    found = dict(line.split() for line in evaluation.stdout.splitlines())
    assert (found['step'], found['examples'], set(found)) == ('3', '6', {'step', 'examples', 'loss', 'accuracy'})
    assert f'test accuracy  {found["accuracy"]}' in first.stdout.splitlines()


def test_what_an_import_wrote_is_shown_only_if_it_fails(capfd):
    with _start._held_stderr():
        os.write(2, b'noise\n')
    assert capfd.readouterr().err == ''
    with contextlib.suppress(ImportError), _start._held_stderr():
        os.write(2, b'cause\n')
        raise ImportError
    assert capfd.readouterr().err == 'cause\n'


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_work_is_exit_75(signum):
    code = 'import time; from scripts import _start; _start.end_on_signals(); print(1, flush=True); time.sleep(60)'
    with subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == '1\n'
        child.send_signal(signum)
        said = f'Stopped by {signum.name} before the work: nothing to save; run it again.\n'
        assert (child.wait(30), child.stderr.read()) == (75, said)


def test_the_table_has_two_columns(capsys):
    _main.print_table({'accuracy': 0.98765, 'run directory': 'runs/x', 'steps': 400})
    assert capsys.readouterr().out == 'accuracy       0.9877\nrun directory  runs/x\nsteps          400\n'


def test_tensorboard_serves_beside_the_body_and_ends_with_it(tmp_path):
    pytest.importorskip('tensorboard')
    said = queue.Queue()
    with _tensorboard.beside(str(tmp_path), say=said.put):
        address = said.get(timeout=60).removeprefix('TensorBoard at ')
        with urllib.request.urlopen(address, timeout=10) as page:
            assert b'TensorBoard' in page.read()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)


def test_tensorboard_does_not_outlive_a_killed_parent(tmp_path):
    code = f"""
import os, pathlib, sys
from scripts import _tensorboard
with _tensorboard.beside({str(tmp_path)!r}):
    print(pathlib.Path(f'/proc/self/task/{{os.getpid()}}/children').read_text(), flush=True)
    sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
    end = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(child)


def is_alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
    return False
