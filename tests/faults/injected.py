"""What the tests of injected faults share: a training in a folder, what is left of it, and one row of the table for each fault.

`pytest -s` shows the rows: fault, exit code, last step made, steps made again, seconds until the next step, files left.
"""

import os
import pathlib
import re
import shutil
import signal
import time

import numpy as np
import runs
import starter
import tensorflow.compat.v1 as tf

from towers.checkpoint import manifest

TRAIN, EVALUATE = (str(starter.ROOT / 'scripts' / name) for name in ('train.py', 'evaluate.py'))
WORK = pathlib.Path(__file__).with_name('waiting_work.py')
DONE, FAILED, MISUSED, STOPPED, KILLED = 0, 1, 2, 75, -9
ENDLESS = 1_000_000
_OF_A_RUN = re.compile(r'checkpoint|config\.json|flags\.txt|metrics\.jsonl|events\.out\.tfevents\..+|sessions|eval|stacks-.+')


class Training:
    """Commands that train and evaluate in the run directory `run` of a folder.

    Args:
      commands: a `starter.Starter`.
      folder: current folder of the commands.
      megabytes: what a checkpoint holds, half of it in a variable and half in its slot.
    """

    def __init__(self, commands, folder, megabytes=0.5):
        self._commands = commands
        self.folder = folder
        self.run = folder / 'run'
        self.megabytes = megabytes
        self._started = []
        self.last = None

    def start(self, *more, steps=ENDLESS, place='.', run='run'):
        """Starts `steps` steps with a checkpoint and a line for each; what is in `more` wins."""
        return self.command(
            place, TRAIN, '--model=waiting_work:model', '--dataset=waiting_work:numbers', '--eval_dataset=none',
            f'--model_args=megabytes={self.megabytes / 2}', f'--model_dir={self.folder / run}', '--device=cpu', '--num_gpus=2',
            '--global_batch_size=4', '--learning_rate=0.001', '--log_steps=1', '--save_steps=1', f'--train_steps={steps}', *more,
        )  # fmt: skip

    def follow(self, place='evaluator'):
        """Starts an evaluator of each new checkpoint."""
        flags = ['--continuous', '--eval_dataset=waiting_work:numbers', '--eval_idle_secs=60', '--eval_max_slowdown=1']
        return self.command(place, EVALUATE, f'--model_dir={self.run}', *flags)

    def command(self, place, *argv):
        """Starts a command in a folder below this one."""
        (self.folder / place).mkdir(parents=True, exist_ok=True)
        shutil.copy(WORK, self.folder / place)
        self._started.append(self._commands.start(self.folder / place, *argv))
        return self._started[-1]

    def close(self):
        """Ends what a test that failed has left."""
        for command in self._started:
            if command.code() is None:
                command.send(signal.SIGKILL)

    def trained(self, steps, *more):
        """Trains up to a step and no further."""
        command = self.start(*more, steps=steps)
        assert command.wait() == DONE, command.text()
        self.last = command

    def published(self):
        """The steps whose checkpoints are whole by an own look at each file."""
        return [each.step for each in manifest.all(str(self.run)) if self._is_whole(each)]

    def last_made(self):
        """The last step that was reported."""
        steps = re.findall(r'^{"step": (\d+)', (self.run / 'metrics.jsonl').read_text(), re.MULTILINE)
        return int(steps[-1])

    def strays(self):
        """Files of the run directory that belong neither to a published checkpoint nor to a run."""
        known = {name for each in manifest.all(str(self.run)) for name in [*each.manifest.files, f'ckpt-{each.step}.json']}
        return sorted(name for name in os.listdir(self.run) if name not in known and not _OF_A_RUN.fullmatch(name))

    def goes_on(self, fault, hit, *more, run='run', strays=()):
        """Starts it again after a fault: at the newest whole checkpoint, finite, without strays; shows the fault's row.

        Args:
          fault: name of the row.
          hit: the command that the fault hit, which has ended.
          more: further flags.
          run: the run directory, where it was moved.
          strays: what may stay in the folder, since no writer left it there.

        Returns:
          What the new command said.
        """
        self.run = self.folder / run
        whole, made, left = self.published(), max(last_shown(hit), self.last_made()), self.strays()
        code = hit.code()
        start = time.monotonic()
        command = self.start(*more, run=run)
        command.wait_for('\nstep ')
        secs = time.monotonic() - start
        there = self.strays()
        said = check_stopped(command)
        assert f'Going on from {self.run}/ckpt-{whole[-1]} at step {whole[-1]}.' in said, said
        assert re.search(r'^step (\d+)/', said, re.MULTILINE)[1] == str(whole[-1] + 1)
        self.check_finite()
        assert set(self.strays()) <= set(strays)
        assert {name for name in there if not _in_writing(name)} <= set(strays)
        show(fault, code, made, made - whole[-1], secs, left)
        return said

    def check_finite(self):
        reader = tf.train.load_checkpoint(str(self.run / f'ckpt-{self.published()[-1]}'))
        for name, dtype in reader.get_variable_to_dtype_map().items():
            assert not dtype.is_floating or np.isfinite(reader.get_tensor(name)).all(), name

    def _is_whole(self, each):
        paths = {self.run / name: dict(facts) for name, facts in each.manifest.files.items()}
        return all(path.exists() and runs.measure(path) == facts for path, facts in paths.items())


def _in_writing(name):
    return re.match(r'ckpt-\d+\.|checkpoint\.tmp|config\.json\.tmp', name)


def last_shown(command):
    """The last step that a command has said it made."""
    return max(map(int, re.findall(r'^step (\d+)/', command.text(), re.MULTILINE)), default=0)


def check_stopped(command):
    """Ends a command by SIGTERM, saved; returns what it said."""
    command.send(signal.SIGTERM)
    assert command.wait() == STOPPED, command.text()
    return command.text()


def show(fault, code, made, again, secs, left):
    print(f'\n| {fault} | {code} | {made} | {again} | {secs:.1f} | {", ".join(left) or "none"} |')
