"""The public names and the README agree, and what the README shows is true."""

import pathlib
import re

import towers

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text()
EXAMPLE = re.search(r'```python\n(.*?)```', README, re.DOTALL)[1]


def test_each_public_name_is_there_and_in_the_readme():
    assert sorted(towers.__all__) == list(towers.__all__)
    for name in towers.__all__:
        assert getattr(towers, name).__doc__, name
        assert f'towers.{name}' in README, name


def test_the_readme_names_no_other():
    assert set(re.findall(r'towers\.([A-Za-z]\w+)(?![/\w.])', README)) <= {*towers.__all__, 'train'}


def test_the_readmes_model_trains(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert len([line for line in EXAMPLE.splitlines() if line.strip()]) <= 15
    exec(compile(EXAMPLE, 'README.md', 'exec'), {'__name__': '__main__'})
    step, accuracy = capsys.readouterr().out.split()[-2:]
    assert step == '400'
    assert float(accuracy) >= 0.9
    assert (tmp_path / 'runs' / 'mine' / 'ckpt-400.json').exists()


def test_the_readmes_commands_are_those_that_ci_runs():
    ci = (ROOT / '.ci' / 'run').read_text()
    assert '-m pytest -q -n auto' in README and '-m pytest -q -n auto' in ci
