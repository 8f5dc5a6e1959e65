"""Three machines and a training over them, where a file has no others of its own; two hosts with addresses."""

import os
import subprocess

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


@pytest.fixture
def two_hosts():
    """Two network namespaces with addresses of their own, a link between them; gives (name, address, link) of each."""
    names = [f'towers{os.getpid()}{end}' for end in 'ab']
    made = [(name, f'10.77.0.{number}') for number, name in enumerate(names, 1)]
    if any(subprocess.run(['ip', 'netns', 'add', name], capture_output=True, check=False).returncode for name in names):
        pytest.skip('network namespaces are not allowed here')
    try:
        links = [f'tw{os.getpid() % 10000}{end}' for end in 'ab']
        subprocess.run(['ip', 'link', 'add', links[0], 'type', 'veth', 'peer', 'name', links[1]], check=True)
        for (name, address), link in zip(made, links, strict=True):
            subprocess.run(['ip', 'link', 'set', link, 'netns', name], check=True)
            for change in (['addr', 'add', f'{address}/24', 'dev', link], ['link', 'set', link, 'up'], ['link', 'set', 'lo', 'up']):
                subprocess.run(['ip', '-n', name, *change], check=True)
        yield [(name, address, link) for (name, address), link in zip(made, links, strict=True)]
    finally:
        for name in names:
            subprocess.run(['ip', 'netns', 'del', name], check=False)
