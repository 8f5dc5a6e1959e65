"""What the tests of faults share."""

import pytest
import starter


@pytest.fixture(scope='session')
def commands():
    """Starts commands that have imported TensorFlow already."""
    made = starter.Starter()
    yield made
    made.close()
