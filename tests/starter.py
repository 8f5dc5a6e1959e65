"""Starts commands as processes of their own without the seconds that importing TensorFlow takes.

One process imports everything once and forks for each command, which then runs as `python scripts/...` does. What the
command writes, its number and its exit code are files in its current folder.
"""

import contextlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMIT_SECS = 120
TAG = 'TOWERS_TEST'  # in the environment of all processes of a command


class Command:
    """A running command."""

    def __init__(self, folder, tag):
        self.folder = folder
        self.tag = tag
        wait_for(lambda: (folder / 'pid').exists())
        self.pid = int((folder / 'pid').read_text())

    def text(self):
        """What it has written so far, to both streams."""
        path = self.folder / 'output'
        return path.read_text(errors='replace') if path.exists() else ''

    def wait_for(self, text):
        """Waits until `text` is in its output."""
        wait_for(lambda: text in self.text() or self.code() is not None)
        assert text in self.text(), self.text()

    def send(self, number):
        """Sends a signal; False where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False

    def code(self):
        """Its exit code, as `subprocess` gives it; None while it runs."""
        path = self.folder / 'code'
        return int(path.read_text()) if path.exists() else None

    def wait(self, secs=LIMIT_SECS):
        """Waits for its end and returns the exit code."""
        wait_for(lambda: self.code() is not None, secs)
        return self.code()

    def processes(self):
        """The processes that belong to it, its children included, by number: their command lines."""
        found = {}
        for path in pathlib.Path('/proc').glob('[0-9]*'):
            with contextlib.suppress(OSError):
                if f'{TAG}={self.tag}\0'.encode() in (path / 'environ').read_bytes():
                    found[int(path.name)] = (path / 'cmdline').read_bytes().replace(b'\0', b' ').decode()
        return found


class Starter:
    """The process that forks."""

    def __init__(self):
        environment = {**os.environ, 'CUDA_VISIBLE_DEVICES': '-1'}  # a GPU's driver does not survive a fork
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, env=environment, text=True)
        self._count = 0

    def start(self, folder, *argv):
        """Starts a script with its arguments; `folder`, which is made, is its current folder and gets its files."""
        self._count += 1
        tag = f'{os.getpid()}-{self._count}'
        folder.mkdir(parents=True, exist_ok=True)
        for name in ('pid', 'code', 'output'):
            (folder / name).unlink(missing_ok=True)
        self._process.stdin.write(json.dumps([str(folder), tag, *map(str, argv)]) + '\n')
        self._process.stdin.flush()
        return Command(folder, tag)

    def close(self):
        self._process.stdin.close()
        self._process.wait(LIMIT_SECS)


def wait_for(holds, secs=LIMIT_SECS):
    end = time.monotonic() + secs
    while not holds():
        assert time.monotonic() < end, f'waited {secs} s'
        time.sleep(0.01)


def write(path, text):
    draft = f'{path}.tmp'
    with open(draft, 'w') as file:
        file.write(text)
    os.replace(draft, path)


def serve():
    """Forks for each line of the standard input; a child returns its command, this process None."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        folder, tag, *argv = json.loads(line)
        child = os.fork()
        if child:  # waits and says how it ended
            write(f'{folder}/pid', str(child))
            status = os.waitpid(child, 0)[1]
            write(f'{folder}/code', str(os.waitstatus_to_exitcode(status)))
            os._exit(0)
        os.environ[TAG] = tag
        return folder, argv
    return None


def main():
    sys.path[:0] = [str(ROOT)]
    runpy.run_path(str(ROOT / 'scripts/train.py'), run_name='imported')
    command = serve()
    if command is None:
        return
    folder, argv = command
    os.chdir(folder)
    output = os.open('output', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.argv[:] = argv
    sys.path[:] = [os.path.dirname(argv[0]), *sys.path[1:]]
    runpy.run_path(argv[0], run_name='__main__')


if __name__ == '__main__':
    main()
