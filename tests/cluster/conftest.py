"""Three machines and a training over them; a file whose machines are others has its own."""

import processes
import pytest


@pytest.fixture(scope='module')
def machines(tmp_path_factory):
    """Three worker processes."""
    made = processes.Machines(tmp_path_factory.mktemp('machines'), 3)
    yield made
    made.close()


@pytest.fixture
def training(machines, tmp_path):
    made = processes.Training(machines, tmp_path / 'trained')
    yield made
    made.close()
