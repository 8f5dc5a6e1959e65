"""Thin commands over the library; run them as files: python scripts/train.py.

They import the zoo as `scripts.models`, since the name `models` may be that of a user's own folder.
"""

import os

__path__.append(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
