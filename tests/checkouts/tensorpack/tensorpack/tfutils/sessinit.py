"""See tensorpack/__init__.py."""


class JustCurrentSession:
    pass
