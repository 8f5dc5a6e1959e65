"""The fuzz of crashes finds nothing in the product, and finds what is broken on purpose."""

import re
import subprocess
import sys

import pytest
import starter

FUZZ = str(starter.ROOT / 'scripts/fuzz_crashes.py')
# A product whose resume forgets where its input was.
BROKEN = f"""
import runpy, sys
sys.argv[:] = [{FUZZ!r}, *sys.argv[1:]]
sys.path.insert(0, {str(starter.ROOT)!r})
from towers.checkpoint import restore
restore.Restorer._restore_position = lambda self, session, position: None
runpy.run_path({FUZZ!r}, run_name='__main__')
"""


def fuzz(tmp_path, seconds, *program):
    environment = {**starter.os.environ, 'TMPDIR': str(tmp_path)}
    command = [sys.executable, *program, f'--seconds={seconds}']
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize('seconds', [pytest.param(600, marks=pytest.mark.soak)])
def test_it_finds_nothing(tmp_path, seconds):
    made = fuzz(tmp_path, seconds, FUZZ)
    print(made.stdout)
    assert made.returncode == 0, made.stdout + made.stderr
    assert int(re.search(r'^kills +(\d+)', made.stdout, re.MULTILINE)[1]) > 20
    assert not list(tmp_path.glob('towers-fuzz-*'))


@pytest.mark.soak
def test_it_finds_what_is_broken(tmp_path):
    made = fuzz(tmp_path, 120, '-c', BROKEN)
    assert made.returncode == 1 and 'are not those of a training that was let alone' in made.stderr, made.stdout + made.stderr
