import configparser
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / 'README.md'


@pytest.fixture(scope='module')
def setup():
    parser = configparser.ConfigParser()
    parser.read(ROOT / 'setup.cfg')
    return parser


def lines(text):
    return text.strip().splitlines()


def test_a_wheel_carries_the_library_only_and_all_of_it(setup):
    assert lines(setup['options.packages.find']['include']) == ['towers*']
    folders = {path.parent for path in (ROOT / 'towers').rglob('*.py')}
    assert [folder for folder in folders if not (folder / '__init__.py').exists()] == []


def test_what_is_imported_is_required(setup):
    required = {re.split(r'[>=\[]', line)[0] for line in lines(setup['options']['install_requires'])}
    imported = set()
    for folder in ('towers', 'models', 'scripts'):
        for path in (ROOT / folder).rglob('*.py'):
            imported |= set(re.findall(r'^(?:import|from) (\w+)', path.read_text(), re.MULTILINE))
    foreign = imported - sys.stdlib_module_names - {'towers', 'models', 'scripts'}
    names = {'absl': 'absl-py', 'google': 'protobuf'}
    # TensorBoard is run, not imported.
    assert {names.get(name, name) for name in foreign} | {'tensorboard'} == required


def test_the_changelog_knows_this_version(setup):
    assert f'## {setup["metadata"]["version"]}' in (ROOT / 'CHANGELOG.md').read_text()


@pytest.mark.skipif(not README.exists(), reason='no README')
def test_ci_runs_the_readmes_test_command():
    [command] = re.findall(r'^check tests \$bin/(python .*?)(?: #.*)?$', (ROOT / '.ci/run').read_text(), re.MULTILINE)
    assert f'.venv/bin/{command}' in README.read_text()


@pytest.mark.skipif(not README.exists(), reason='no README')
def test_the_readme_opens_with_the_two_commands():
    text = README.read_text()
    assert text.index('.venv/bin/python scripts/train.py --num_gpus=4') < text.index("-e '.[test]'")
