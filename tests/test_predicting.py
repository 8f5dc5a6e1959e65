"""Results whose reader goes away, or whose disk is full: the process ends, says so, and holds nothing after it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import runs
import starter
import test_exporting

from towers.sessions import ledger

LIMIT_SECS = 60  # for a process that would not end by itself
LEFT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import runs, test_exporting, towers

def rows():
    examples = [{{'x': row}} for row in test_exporting.FEATURES]
    return towers.predict(test_exporting.model, test_exporting.dataset, runs.config({run!r}, eval_batch_size=2), examples=examples)

{ending}
"""
FIRST = "held = rows()\nfor row in held:\n    print(row['class'].item(), flush=True)\n    break\n"
ENDINGS = {
    'broken out of': FIRST,
    'an error': FIRST + "raise KeyError('mine')",
    'an exit': FIRST + 'sys.exit(5)',
    'collected': 'print(next(iter(rows()))["class"].item(), flush=True)',
    'closed': FIRST + 'held.close()',
}


@pytest.fixture
def run(tmp_path):
    runs.publish(tmp_path / 'run', 5, final=True, **test_exporting.values(5))
    return tmp_path / 'run'


@pytest.mark.parametrize('how', ENDINGS)
def test_a_loop_that_is_left_early_does_not_keep_the_process(run, how):
    code = LEFT.format(tests=os.path.dirname(__file__), root=str(starter.ROOT), run=str(run), ending=ENDINGS[how])
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=LIMIT_SECS)
    expected = str(test_exporting.expected(5, test_exporting.FEATURES)['class'][0])
    assert (done.stdout.split(), done.returncode) == ([expected], {'an error': 1, 'an exit': 5}.get(how, 0)), done.stderr
    assert 'Exception ignored' not in done.stderr
    assert ledger.read(str(run / 'sessions')) == []


@pytest.fixture(scope='module')
def commands():
    made = starter.Starter()
    yield made
    made.close()


@pytest.fixture(scope='module')
def trained(commands, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    flags = [f'--model_dir={folder / "run"}', '--model=mlp', '--device=cpu', '--train_steps=3', '--eval_dataset=none']
    done = commands.start(folder / 'train', starter.ROOT / 'scripts/train.py', *flags)
    assert done.wait() == 0, done.text()
    np.savez(folder / 'new.npz', image=np.zeros([3000, 8, 8, 1], np.float32))
    return folder


def predicted(commands, trained, place, *more):
    flags = [f'--model_dir={trained / "run"}', f'--files={trained / "new.npz"}']
    return commands.start(place, starter.ROOT / 'scripts/predict.py', *flags, *more)


def test_a_full_disk_is_one_line(commands, trained, tmp_path):
    done = predicted(commands, trained, tmp_path / 'full', '--output=/dev/full')
    assert done.wait(LIMIT_SECS) == 1, done.text()
    text = '--output=/dev/full could not be written to its end (No space left on device), so it is cut off; make room there or'
    assert done.text().splitlines()[-1].startswith(text) and 'Traceback' not in done.text()
    assert ledger.read(str(trained / 'run/sessions')) == []


def test_an_output_that_can_not_be_is_wrong_use(commands, trained, tmp_path):
    done = predicted(commands, trained, tmp_path / 'folder', f'--output={tmp_path}')
    assert done.wait(LIMIT_SECS) == 2, done.text()
    assert done.text().splitlines()[-1].startswith(f'--output={tmp_path} can not be made (Is a directory)')


@pytest.mark.parametrize('name', ['predict', 'evaluate'])
@pytest.mark.parametrize(('target', 'code', 'said'), [('head', 0, ''), ('full', 1, 'The standard output could not be written to its end')])
def test_a_standard_output_that_takes_no_more_ends_the_command(trained, name, target, code, said):
    script = [sys.executable, str(starter.ROOT / f'scripts/{name}.py'), f'--model_dir={trained / "run"}']
    script += [f'--files={trained / "new.npz"}'] if name == 'predict' else ['--eval_dataset=digits']
    read, write = os.pipe()
    if target == 'full':
        os.close(write)
        write = os.open('/dev/full', os.O_WRONLY)
    process = subprocess.Popen(script, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    if target == 'head' and name == 'predict':
        with open(read, encoding='utf-8') as lines:
            assert json.loads(lines.readline())['example'] == 0
    else:
        os.close(read)
    _, error = process.communicate(timeout=LIMIT_SECS)
    assert (process.returncode, 'Traceback' in error, 'Exception ignored' in error) == (code, False, False), error
    assert said in error
    assert ledger.read(str(trained / 'run/sessions')) == []


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MB; only root can make one."""
    folder = tmp_path / 'disk'
    folder.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', folder], capture_output=True, check=False).returncode:
        pytest.skip('a file system can only be mounted by root')
    yield folder
    subprocess.run(['umount', '-l', folder], check=True)


def test_what_a_full_disk_keeps_out_fails_the_command_and_leaves_nothing(commands, trained, small_disk, tmp_path):
    run = shutil.copytree(trained / 'run', small_disk / 'run', ignore=shutil.ignore_patterns('eval', 'export'))
    with contextlib.suppress(OSError), open(small_disk / 'ballast', 'wb', buffering=0) as file:
        while file.write(bytes(4096)):
            pass

    def ended(name, *more):
        done = commands.start(tmp_path / name, starter.ROOT / f'scripts/{name}.py', f'--model_dir={run}', *more)
        return done.wait(LIMIT_SECS), done.text()

    code, text = ended('export', '--frozen')
    assert code == 1 and 'Traceback' not in text, text
    assert text.splitlines()[-1].startswith(f'{run}/export/3 could not be written (') and 'No space left on device' in text
    assert not (run / 'export').exists()
    code, text = ended('evaluate', '--eval_dataset=digits')
    assert code == 1 and 'results.jsonl can not be written' in text, text
    assert 'accuracy' in text.splitlines()[-1]  # what was found is shown
    (small_disk / 'ballast').unlink()
    for name, more in (('export', ()), ('evaluate', ('--eval_dataset=digits',))):
        assert ended(name, *more)[0] == 0
    code, text = ended('evaluate', '--eval_dataset=digits', '--eval_batch_size=7')
    assert code == 0 and 'results.jsonl has this result of ckpt-3 already, so it is not written again.' in text
    assert len((run / 'eval/test/results.jsonl').read_text().splitlines()) == 1
