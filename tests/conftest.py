"""What every test needs before TensorFlow is loaded; its presence also lets tests import `harness`."""

import os

os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
