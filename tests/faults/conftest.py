"""What the tests of faults share."""

import injected
import pytest
import starter


@pytest.fixture(scope='session')
def commands():
    """Starts commands that have imported TensorFlow already."""
    made = starter.Starter()
    yield made
    made.close()


@pytest.fixture
def training(commands, tmp_path):
    """A training in the test's folder, which is ended with the test."""
    made = injected.Training(commands, tmp_path)
    yield made
    made.close()
