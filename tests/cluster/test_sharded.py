"""Machines that read shards of the files: each its own part, which others read on where a machine is lost, every example once."""

import itertools
import json
import pathlib
import re
import signal
import threading

import harness
import numpy as np
import processes
import pytest
import sharded_training
import starter
import tensorflow.compat.v1 as tf

import towers
from towers.jobs import connecting, program

PROGRAM = pathlib.Path(__file__).resolve().parent / 'sharded_training.py'
MACHINES, BATCH, STEPS = 3, 12, 60
EXAMPLES = sharded_training.FILES * sharded_training.RECORDS
PASS = EXAMPLES // BATCH  # steps


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """The folder of the files."""
    folder = tmp_path_factory.mktemp('files')
    sharded_training.write(folder)
    return folder


@pytest.fixture
def machines(tmp_path):
    made = processes.Machines(tmp_path / 'machines', MACHINES)
    yield made
    made.close()


class Training:
    """A training over the files, in a folder of its own."""

    def __init__(self, machines, folder, files):
        self._machines, self._folder, self._files = machines, folder, files
        self.command, self._before = None, ''

    @property
    def said(self):
        """What all its starts have written so far."""
        return self._before + (self.command.text() if self.command else '')

    def start(self, steps, **settings):
        self._before = self.said
        limits = {'step_timeout_secs': 30, 'connect_timeout_secs': 60, 'save_steps': 7, 'global_batch_size': BATCH, 'input_shards': 12}
        given = json.dumps({**self._machines.flags, **limits, **settings})
        self.command = self._machines.run(self._folder, PROGRAM, 2, steps, given, self._files)
        return self.command

    def ids(self):
        """Step -> its examples, later lines winning."""
        path = self._folder / 'ids.jsonl'
        return {line['step']: line['ids'] for line in map(json.loads, path.read_text().splitlines())} if path.exists() else {}

    def wait_for_step(self, step):
        starter.wait_for(lambda: max(self.ids(), default=0) >= step or self.command.code() is not None)
        assert self.command.code() is None, self.command.text()

    def check(self, steps):
        """Every example once in each pass; a step that its session did not live to report is known by what the others leave."""
        found = self.ids()
        unsaid = set(range(1, steps + 1)) - set(found)
        assert max(found) <= steps and unsaid <= set(map(int, re.findall(r'going on with them at step (\d+)', self.said)))
        for first in range(1, steps + 1, PASS):
            ids = [found[step] for step in range(first, first + PASS) if step in found]
            assert [len(each) for each in ids] == [BATCH] * len(ids) and len(ids) >= PASS - 1
            assert len(set(itertools.chain(*ids)) & set(range(EXAMPLES))) == BATCH * len(ids)


def test_shards_of_a_killed_worker_are_read_on_by_the_others(machines, tmp_path, files):
    training = Training(machines, tmp_path / 'trained', files)
    alone = {'worker_hosts': [], 'master_host': None}
    training.start(STEPS, worker_grace_secs=1, min_workers=2)
    training.wait_for_step(18)  # in a pass, with a checkpoint in another place of it
    machines.commands[1].send(signal.SIGKILL)
    assert training.command.wait() == 0, training.command.text()
    training.check(STEPS)
    text = training.command.text()
    assert 'Going on with 2 machines' in text and 'The pass of the input is read again' in text
    assert text.count('The examples of 12 shards are counted') == 1
    assert re.findall(r'Of the 12 shards (.*)\.', text) == [
        ', '.join(f'{12 // len(there)} go to /job:worker/task:{worker}/cpu:0' for worker in there) for there in ((0, 1, 2), (0, 2))
    ]
    # It goes on as another number of machines, which is one, but not in other shards.
    assert training.start(STEPS + PASS, **alone).wait() == 0, training.command.text()
    training.check(STEPS + PASS)
    assert 'are counted' not in training.command.text()
    assert training.start(STEPS + 2 * PASS, input_shards=6, **alone).wait() == 1
    assert re.search(r'input_shards was 12, is 6; .*As before: --input_shards=12\.', training.command.text())


@pytest.mark.soak
def test_a_worker_that_comes_back_gets_shards_again(machines, tmp_path, files):
    training, steps = Training(machines, tmp_path / 'trained', files), 400 * PASS  # time for a worker to start
    training.start(steps, worker_grace_secs=1, min_workers=2)
    training.wait_for_step(18)
    processes.leave_out_and_take_in(machines, training)
    training.check(steps)
    shares = re.findall(r'Of the 12 shards (\d) go', training.command.text())
    assert shares == ['4', '6', '4']


def read_bytes(machines):
    """What each worker has read so far."""
    found = [(pathlib.Path('/proc') / str(command.pid) / 'io').read_text() for command in machines.commands]
    return np.array([int(re.search(r'rchar: (\d+)', text)[1]) for text in found])


@pytest.mark.parametrize(('count', 'part'), [(0, 1), (12, 1 / MACHINES)], ids=['all', 'shards'])
def test_a_machine_reads_its_part_alone(machines, tmp_path, count, part):
    records, record = 64, 1 << 13
    sharded_training.write(tmp_path / 'files', records=records, record=record)

    def dataset():
        return sharded_training.dataset(str(tmp_path / 'files'), record)

    def model(batch, *, training):
        tf.add_to_collection('ids', batch['id'])
        return towers.ModelOutput(tf.reduce_mean(batch['x']) * tf.get_variable('w', []))

    steps = 16
    size = sharded_training.FILES * records // steps
    config = machines.config(n=2, global_batch_size=size, input_shards=count, prefetch=0)
    with connecting.connected(harness.config(**machines.flags), threading.Event()) as link:
        made = program.at(link.site(config), model, dataset, config)
        with made.graph.as_default(), made.site.session(made.graph) as session:
            for operation in (made.init, made.step.input.initializer, made.step.sync):
                session.run(operation)
            before = read_bytes(machines)
            ids = [session.run([made.graph.get_collection('ids'), made.step.ops])[0] for _ in range(steps)]
            found = (read_bytes(machines) - before) / (sharded_training.FILES * records * record)
        link.finish()
    assert sorted(np.concatenate(list(itertools.chain(*ids)))) == list(range(sharded_training.FILES * records))
    assert part <= found.min() <= found.max() < part + 3 / sharded_training.FILES  # a file or two are read ahead
