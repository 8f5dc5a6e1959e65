"""The commands as they are typed: a rehearsal on this machine, one command on every machine, a link that is cut."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import processes
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN, WORKER, REHEARSE = (ROOT / 'scripts' / name for name in ('train.py', 'worker.py', 'local_cluster.py'))
SMALL = ['--model=mlp', '--eval_dataset=none', '--device=cpu', '--num_gpus=2', '--global_batch_size=24', '--log_steps=10']
LIMIT_SECS = 240
BEHIND = re.compile(r'scripts/(worker|_child)\.py')

pytestmark = pytest.mark.soak


def command(*argv, folder, inside=(), **environ):
    """Starts a command; its output is in its file `output`."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'output', 'ab') as output:
        argv = [*inside, sys.executable, *map(str, argv)]
        return subprocess.Popen(argv, cwd=folder, stdout=output, stderr=output, env={**os.environ, **environ})


def said(folder):
    return (folder / 'output').read_text(errors='replace')


def wait_for(folder, text, secs=LIMIT_SECS):
    end = time.monotonic() + secs
    while text not in said(folder):
        assert time.monotonic() < end, said(folder)
        time.sleep(0.1)


def rows(folder):
    lines = [json.loads(line) for line in (folder / 'run' / 'metrics.jsonl').read_text().splitlines()]
    return {line['step']: line['loss'] for line in lines}


def left(folder):
    """Command lines of processes that a command left behind."""
    found = [path.read_bytes().replace(b'\0', b' ').decode() for path in pathlib.Path('/proc').glob('[0-9]*/cmdline') if path.exists()]
    return [line for line in found if BEHIND.search(line) and str(folder) in line]


def test_two_processes_are_measured_against_one(tmp_path):
    flags = ['--measure=machines', '--model=mlp', '--eval_dataset=none', '--num_gpus=1', '--rounds=3', '--slice_steps=4']
    child = command(ROOT / 'scripts' / 'benchmark.py', *flags, folder=tmp_path)
    assert child.wait(LIMIT_SECS) == 0, said(tmp_path)
    rates = [float(rate) for rate in re.findall(r'^(?:two|one) process(?:es)?, steps/s \(median\) +([\d.]+)', said(tmp_path), re.MULTILINE)]
    assert len(rates) == 2 and min(rates) > 0
    assert re.search(r'^two processes / one process .* ([\d.]+) \(', said(tmp_path), re.MULTILINE)


def test_a_rehearsal_runs_through_and_leaves_nothing(tmp_path):
    flags = ['--machines=2', '--num_gpus=2', '--ps=1', '--', *SMALL, '--train_steps=30', f'--model_dir={tmp_path}/run']
    child = command(REHEARSE, *flags, folder=tmp_path)
    assert child.wait(LIMIT_SECS) == 0, said(tmp_path)
    text = said(tmp_path)
    assert re.search(r'^master +\| .*4 towers on 2 machines', text, re.MULTILINE)
    assert all(re.search(rf'^{name} *\| .*the run is over', text, re.MULTILINE) for name in ('worker 0', 'worker 1', 'ps 0'))
    assert left(tmp_path) == []


def test_a_signal_to_a_rehearsal_saves_and_ends_all(tmp_path):
    flags = ['--machines=2', '--num_gpus=2', '--', *SMALL, '--train_steps=1000000', '--log_steps=20', f'--model_dir={tmp_path}/run']
    child = command(REHEARSE, *flags, folder=tmp_path)
    wait_for(tmp_path, 'step 20/')
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 75, said(tmp_path)
    assert 'which is saved' in said(tmp_path) and left(tmp_path) == []


def test_one_command_everywhere_by_tf_config(tmp_path):
    hosts = processes.free_ports(3)
    children = []
    for index in range(3):
        config = json.dumps({'cluster': {'chief': hosts[:1], 'worker': hosts[1:]}, 'task': {'type': 'worker', 'index': index - 1}})
        config = config if index else config.replace('{"type": "worker", "index": -1}', '{"type": "chief", "index": 0}')
        flags = [*SMALL, '--train_steps=20', '--log_steps=1', f'--model_dir={tmp_path}/0/run']
        children.append(command(TRAIN, *flags, folder=tmp_path / str(index), TF_CONFIG=config))
    assert [child.wait(LIMIT_SECS) for child in children] == [0, 0, 0], said(tmp_path / '0')
    assert '6 towers on 3 machines' in said(tmp_path / '0')
    alone = command(TRAIN, *SMALL, '--train_steps=20', '--log_steps=1', f'--model_dir={tmp_path}/alone/run', folder=tmp_path / 'alone')
    assert alone.wait(LIMIT_SECS) == 0
    for step, loss in rows(tmp_path / 'alone').items():
        assert rows(tmp_path / '0')[step] == pytest.approx(loss, abs=1e-5)


def test_a_link_that_is_cut_for_a_while(two_hosts, tmp_path):
    (here, address, _), (there, other, link) = two_hosts
    hosts = [f'--worker_hosts={address}:2222,{other}:2222', f'--master_host={address}:2222', '--step_timeout_secs=5']
    worker = command(WORKER, *hosts, '--task_index=1', '--device=cpu', folder=tmp_path / 'worker', inside=['ip', 'netns', 'exec', there])
    flags = [*SMALL, *hosts, '--train_steps=1500', '--save_steps=100', '--log_steps=1', f'--model_dir={tmp_path}/run']
    master = command(TRAIN, *flags, folder=tmp_path, inside=['ip', 'netns', 'exec', here])
    try:
        wait_for(tmp_path, 'step 150/')
        subprocess.run(['ip', '-n', there, 'link', 'set', link, 'down'], check=True)
        wait_for(tmp_path, 'the cluster failed', 20)
        time.sleep(20)
        subprocess.run(['ip', '-n', there, 'link', 'set', link, 'up'], check=True)
        assert master.wait(LIMIT_SECS) == 0, said(tmp_path)
        assert worker.wait(30) == 0, said(tmp_path / 'worker')
        assert list(rows(tmp_path)) and max(rows(tmp_path)) == 1500
        assert 'no sign of life of the master' in said(tmp_path / 'worker')
    finally:
        for child in (master, worker):
            child.kill()
