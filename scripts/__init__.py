"""Thin commands over the library; run them as files: python scripts/train.py.

They import the zoo as `scripts.models`, since the name `models` may be that of a user's own folder.
"""

import pathlib

__path__.append(str(pathlib.Path(__file__).resolve().parent.parent))
