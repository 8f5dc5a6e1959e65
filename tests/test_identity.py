"""What a process says of its own code."""

import pathlib
import shutil
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parent.parent / 'towers'
ASK = 'import importlib.util, sys; spec = importlib.util.spec_from_file_location("identity", sys.argv[1]); ' + (
    'made = importlib.util.module_from_spec(spec); spec.loader.exec_module(made); print(made.code())'
)


def code_of(package):
    """By a process that has nothing but this module of it."""
    return subprocess.run([sys.executable, '-c', ASK, str(package / 'identity.py')], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def copied(tmp_path):
    return pathlib.Path(shutil.copytree(PACKAGE, tmp_path / 'elsewhere', ignore=shutil.ignore_patterns('__pycache__')))


def append(path):
    path.write_text(path.read_text() + '# changed\n')


@pytest.mark.parametrize(
    ('change', 'is_same'),
    [
        (lambda package: None, True),
        (lambda package: (package / 'notes.txt').write_text('nothing'), True),
        (lambda package: append(package / 'graph' / 'build.py'), False),
        (lambda package: (package / 'metrics.py').rename(package / 'metric.py'), False),
        (lambda package: (package / 'more.py').write_text(''), False),
    ],
    ids=['copied', 'another file', 'changed', 'renamed', 'added'],
)
def test_the_digest_of_the_code_is_that_of_its_files(copied, change, is_same):
    change(copied)
    assert (code_of(copied) == code_of(PACKAGE)) == is_same
