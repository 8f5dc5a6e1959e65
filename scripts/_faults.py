"""A training that is killed again and again, its newest files damaged in between, and what must hold each time.

Each trainer is a forked child that is killed at a random moment, before a random one of its own calls to the file system,
or, where strace is there, at a random system call of any of its threads. Then, now and then, the newest checkpoints are
cut, emptied, flipped in one bit or deleted, but never all of them. Whether a checkpoint is whole is judged here by an own
look at its files. A training that has come to its end must have taken the same examples and reported the same losses as
one that was let alone, bit for bit.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from typing import Any

from scripts import _faults_trainer

_LIMIT_SECS = 120.0  # a child that takes longer hangs
_DAMAGES = ('cut', 'empty', 'flip', 'delete')
_TRACED = 'openat,rename,unlink,link,write,pwrite64,fsync,fdatasync,ftruncate,truncate,mkdir,utimensat'
_PUBLISHED = re.compile(r'ckpt-(\d+)\.json')
_OTHERS = re.compile(r'checkpoint|config\.json|metrics\.jsonl|events\.out\.tfevents\..+|sessions')


class Life:
    """One training from its first step to its last, over as many trainers as it takes.

    Args:
      folder: where it lives.
      seed: of all that is random here; the training itself is always the same.
    """

    def __init__(self, folder: pathlib.Path, seed: int = 0):
        self.folder = folder
        self.problems: list[str] = []
        self.done = False
        self.kills = self.damages = 0
        self._chance = random.Random(seed)
        self._bad: dict[int, Any] = {}
        folder.mkdir(parents=True)

    def trainer(self, secs: float | None = None, *, call: int = 0, system_call: int = 0) -> float:
        """Lets one trainer run until it is killed, or to its end, and looks at what it has done.

        Args:
          secs: it is killed after so long.
          call: it is killed before so many calls to the file system.
          system_call: it is killed by strace at so many system calls of one kind in one thread.

        Returns:
          the seconds it took.
        """
        before, starts = self._newest(), len(rows(self.folder / 'starts.jsonl'))
        began = time.monotonic()
        child = os.fork()
        if not child:
            _faults_trainer.train(self.folder, call)
        tracer = _trace(child, system_call) if system_call else None
        code = _wait(child, secs)
        if tracer is not None:
            tracer.wait(_LIMIT_SECS)
        self.kills += code == -signal.SIGKILL
        self.done = code == 0
        how = f'after {secs} s' if secs else f'before call {call}' if call else f'at system call {system_call}' if system_call else 'never'
        self._look(before, rows(self.folder / 'starts.jsonl')[starts:], f'trainer killed {how}, exit code {code}', code)
        return time.monotonic() - began

    def damage(self) -> None:
        """Damages one or two files of the newest one or two checkpoints, and leaves at least one whole."""
        whole = self._whole()
        for step in whole[-min(self._chance.randint(1, 2), len(whole) - 1) :] if len(whole) > 1 else ():
            names = sorted(name for name in os.listdir(self.folder / 'run') if name.startswith(f'ckpt-{step}.'))
            for name in self._chance.sample(names, self._chance.randint(1, 2)):
                _damage(self.folder / 'run' / name, self._chance)
            self.damages += 1
            self._bad[step] = self._signature(step)
        if self._chance.random() < 0.2 and (self.folder / 'run/checkpoint').exists():
            _damage(self.folder / 'run/checkpoint', self._chance)

    def compare(self, reference: 'Life') -> None:
        """Holds examples and losses against those of a training that was let alone."""
        for name, value in (('ids.jsonl', 'ids'), ('run/metrics.jsonl', 'loss')):
            mine, other = ({row['step']: row[value] for row in rows(life.folder / name)} for life in (self, reference))
            if mine != other:
                steps = sorted(step for step in mine.keys() | other.keys() if mine.get(step) != other.get(step))
                self.problems.append(f'{value} of the steps {steps[:5]} are not those of a training that was let alone')

    def _look(self, before: int, starts: list[dict[str, Any]], what: str, code: int) -> None:
        if code not in (0, -signal.SIGKILL):
            self.problems.append(f'{what}: expected 0 or {-signal.SIGKILL:d}; see {self.folder}/output')
        for start in starts:
            allowed = {f'ckpt-{step}.json' for step in _published(start['names'])}
            # Files whose manifest was deleted here are no writer's work that is known to be unfinished: nobody removes them.
            allowed |= {f'ckpt-{step}.json' for step in self._bad}
            strays = [name for name in start['names'] if not _OTHERS.fullmatch(name) and _base(name) not in allowed]
            if start['step'] != before or not start['finite'] or strays:
                self.problems.append(
                    f'{what}: it began with {start["step"]}, expected {before}; finite: {start["finite"]}; strays: {strays}'
                )
        for step in _published(os.listdir(self.folder / 'run') if (self.folder / 'run').exists() else []):
            if not self._is_whole(step) and self._bad.get(step) != self._signature(step):
                self.problems.append(f'{what}: step {step} is published and not whole')
        if self._newest() < before:
            self.problems.append(f'{what}: the checkpoint of step {before} is lost, the newest is that of {self._newest()}')

    def _newest(self) -> int:
        return max(self._whole(), default=0)

    def _whole(self) -> list[int]:
        names = os.listdir(self.folder / 'run') if (self.folder / 'run').exists() else []
        return [step for step in _published(names) if self._is_whole(step) and self._bad.get(step) != self._signature(step)]

    def _is_whole(self, step: int) -> bool:
        try:
            files = json.loads((self.folder / f'run/ckpt-{step}.json').read_text())['files']
            contents = {name: (self.folder / 'run' / name).read_bytes() for name in files}
        except (OSError, ValueError, LookupError):
            return False
        return all({'size': len(content), 'crc32': zlib.crc32(content)} == files[name] for name, content in contents.items())

    def _signature(self, step: int) -> Any:
        states = {path.name: path.stat() for path in (self.folder / 'run').glob(f'ckpt-{step}.*') if not path.name.endswith('.tmp')}
        return sorted((name, state.st_ino, state.st_mtime_ns, state.st_size) for name, state in states.items())


def fuzz(folder: pathlib.Path, seconds: float, seed: int, say: Callable[[str], None]) -> tuple[dict[str, int], list[str]]:
    """Kills trainers for so many seconds.

    Args:
      folder: where the trainings live; those without problems are removed.
      seconds: no other trainer is started after that.
      seed: of the moments and the damages.
      say: told of each training that ended.

    Returns:
      What was done, in numbers, and the problems found.
    """
    chance, end = random.Random(seed), time.monotonic() + seconds
    reference = Life(folder / 'alone')
    usual = reference.trainer()
    calls = int((reference.folder / 'calls').read_text())
    made, problems = {'trainings': 0, 'kills': 0, 'damaged checkpoints': 0}, list(reference.problems)
    while time.monotonic() < end and not problems:
        life = Life(folder / f'{made["trainings"] + 1}', chance.randrange(1 << 30))
        while not life.done and not life.problems and time.monotonic() < end:
            _one(life, chance, usual, calls)
        if life.done:
            life.compare(reference)
        problems += life.problems
        made['trainings'] += 1
        made['kills'] += life.kills
        made['damaged checkpoints'] += life.damages
        say(f'training {made["trainings"]}: {life.kills} kills, {life.damages} damaged checkpoints, {len(life.problems)} problems')
        if not life.problems:
            shutil.rmtree(life.folder)
    return made, problems


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, but for a line that a killed process left half."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith('}')] if path.exists() else []


def _one(life: Life, chance: random.Random, usual: float, calls: int) -> None:
    way = chance.choice(
        ('moment', 'call', 'call', 'system call' if shutil.which('strace') else 'moment', 'end' if life.kills > 5 else 'moment')
    )
    if way == 'call':
        life.trainer(call=chance.randint(1, calls))
    elif way == 'system call':
        life.trainer(system_call=chance.randint(1, 60))
    else:
        life.trainer(chance.uniform(0.0, usual) if way == 'moment' else None)
    if not life.done and chance.random() < 0.4:
        life.damage()


def _wait(child: int, secs: float | None) -> int:
    end = time.monotonic() + (_LIMIT_SECS if secs is None else secs)
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return signal.SIGALRM if secs is None else code  # nothing but a hang takes so long


def _trace(child: int, number: int) -> subprocess.Popen[bytes]:
    fault = f'inject={_TRACED}:signal=SIGKILL:when={number}'
    return subprocess.Popen(['strace', '-qq', '-f', '-o', os.devnull, '-e', f'trace={_TRACED}', '-e', fault, '-p', str(child)])


def _damage(path: pathlib.Path, chance: random.Random) -> None:
    how, size = chance.choice(_DAMAGES), path.stat().st_size
    if how == 'delete' or not size:
        path.unlink()
    elif how == 'flip':
        content = bytearray(path.read_bytes())
        content[chance.randrange(size)] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
    else:
        os.truncate(path, chance.randrange(size) if how == 'cut' else 0)


def _published(names: list[str]) -> list[int]:
    return sorted(int(match[1]) for match in map(_PUBLISHED.fullmatch, names) if match)


def _base(name: str) -> str:
    return re.sub(r'\.(index|json|data-\d+-of-\d+)$', '.json', name)
