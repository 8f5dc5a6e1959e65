"""The house's rule: imports go one way, files and functions stay small, only TensorFlow's public graph interface is used."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
L0 = {'structs', 'config', 'identity', 'metrics', 'randomness', 'errors', 'upstream', 'transfers', 'shadows', 'reads', 'listening'}
L2 = {'strategies'}
L3 = {
    'program', 'run_directory', 'starting', 'training', 'replaying', 'evaluator', 'results', 'evaluation', 'companion', 'exporting',
    'connecting', 'recovering', 'keeping', 'stepping', 'serving', 'joining', 'feeding', 'planner', 'inference', 'predicting', 'run_hooks',
    'leaving',
}  # fmt: skip
# Folders whose files are stages of their own; in the others (checkpoint, hooks, reduce) all files together are one stage.
ROOMS = {'input', 'graph', 'run', 'directory', 'evaluators', 'jobs'}
# A stage is one file or one folder; a file here belongs to the stage it is named with.
PARTS = {
    'gradients': 'build',
    'passes': 'inputs',
    'single': 'inputs',
    'splitting': 'inputs',
    'copies': 'inputs',
    'cutting': 'inputs',
    'shards': 'inputs',
    'schedule': 'inputs',
    'reseeding': 'variables',
    'weights': 'strategies',
    'making': 'strategies',
    'finite': 'chain',
    'rows': 'optimizers',
    'standing': 'train_step',
    'positions': 'inputs',
    'writes': 'build',
    'fetching': 'session',
    'exhausted': 'session',
    'ending': 'session',
    'calling': 'session',
    'signals': 'session',
    'remote': 'session',
    'watchdog': 'session',
    'rescue': 'session',
    'marks': 'session',
    'loop': 'session',
    'looping': 'session',
    'holder': 'lock',
    'bundle': 'flight',
    'physical': 'devices',
    'machines': 'devices',
    'moved': 'devices',
    'process': 'session_config',
    'evaluator': 'evaluation',
    'results': 'evaluation',
    'scoring': 'evaluation',
    'pace': 'evaluation',
    'unsaved': 'evaluation',
    'inside': 'evaluation',
    'queue': 'evaluation',
    'parts': 'evaluation',
    'picture': 'evaluation',
    'supervisor': 'evaluation',
    'companion': 'evaluation',
}
LINES, TEST_LINES, BODY, ARGUMENTS, NESTING = 300, 450, 40, 5, 3
MORE_ARGUMENTS = {'towers/jobs/training.py': ['train']}  # the public call takes all that a user may bring
BANNED = ('tensorflow.python', 'tensorflow.keras', 'keras', 'tf.keras', 'tf.layers', 'tf.contrib', 'tf.python')
PEERS = [ROOT / 'scripts/_bench/peers.py']  # what Towers is measured against, which is made of Keras
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def files(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob('*.py'))]


def name_of(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """The dotted names that a file imports: 'towers.structs', 'numpy'."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f'{node.module}.{alias.name}' for alias in node.names]
    return names


def stage(dotted):
    """'towers.checkpoint.saver' -> 'checkpoint'; 'towers.run.fetching' -> 'session'."""
    names = dotted.split('.')[1:]
    name = names[1] if names[0] in ROOMS and len(names) > 1 else names[0]
    return PARTS.get(name, name)


def level(room):
    return 0 if room in L0 else 2 if room in L2 else 3 if room in L3 else 1


def is_allowed(room, target):
    """Whether a room of the library may import another: L0 < L1 < L2 < L3, and L1 never another L1."""
    if room == target:
        return True
    if level(room) == level(target):
        return level(room) in (0, 3)
    return level(room) > level(target)


@pytest.mark.parametrize(
    ('room', 'target', 'allowed'),
    [('build', 'structs', True), ('build', 'inputs', False), ('structs', 'build', False), ('program', 'build', True),
     ('strategies', 'reduce', True), ('reduce', 'strategies', False), ('hooks', 'hooks', True), ('build', 'training', False)],
)  # fmt: skip
def test_the_rule_itself(room, target, allowed):
    assert is_allowed(room, target) == allowed


@pytest.mark.parametrize('path', [p for p in files('towers') if p != ROOT / 'towers/__init__.py'], ids=name_of)
def test_the_library_imports_one_way(path):
    room = stage('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    names = imported(path)
    ours = [name for name in names if name.startswith('towers.')]
    assert [name for name in ours if not is_allowed(room, stage(name))] == []
    assert [name for name in names if name.split('.')[0] in ('models', 'scripts', 'tests')] == []


@pytest.mark.parametrize('path', files('models'), ids=name_of)
def test_the_zoo_sees_public_names_only(path):
    assert [name for name in imported(path) if name.startswith(('towers.', 'scripts', 'tests'))] == []


@pytest.mark.parametrize('path', [p for p in files('towers', 'models', 'scripts') if p not in PEERS], ids=name_of)
def test_only_the_public_graph_interface_is_used(path):
    tree = ast.parse(path.read_text())
    used = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert [name for name in [*imported(path), *used] if f'{name}.'.startswith(tuple(f'{b}.' for b in BANNED))] == []
    assert [name for name in used if name.startswith('tf.') and is_private(name)] == []
    aliases = [a.asname for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if a.name.startswith('tensorflow')]
    assert set(aliases) <= {'tf'}


@pytest.mark.parametrize('path', files('towers', 'models', 'scripts', 'tests'), ids=name_of)
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    is_test = path.is_relative_to(ROOT / 'tests')
    assert len(text.splitlines()) <= (TEST_LINES if is_test else LINES)
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS)]
    assert [f.name for f in functions if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(f))] == []
    assert [f.name for f in functions if body_lines(f) > BODY] == []
    if not is_test:
        assert [f.name for f in functions if nesting(f) > NESTING] == []
        assert [f.name for f in functions if len(arguments(f)) > ARGUMENTS] == MORE_ARGUMENTS.get(name_of(path), [])


@pytest.mark.parametrize('path', [p for p in sorted((ROOT / 'scripts').glob('*.py')) if not p.name.startswith('_')], ids=name_of)
def test_commands_are_thin(path):
    assert len(path.read_text().splitlines()) <= 60


def body_lines(function):
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def arguments(function):
    spec = function.args
    return [a.arg for a in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs) if a.arg not in ('self', 'cls')]


def nesting(node, depth=0):
    """The deepest block in a function; an elif is as deep as its if."""
    children = []
    for field, value in ast.iter_fields(node):
        inside = value if isinstance(value, list) else [value]
        is_elif = field == 'orelse' and isinstance(node, ast.If) and len(inside) == 1 and isinstance(inside[0], ast.If)
        for child in inside:
            if isinstance(child, ast.AST) and not isinstance(child, FUNCTIONS):
                children.append(nesting(child, depth + (isinstance(child, BLOCKS) and not is_elif)))
    return max(children, default=depth)


def is_private(dotted):
    return any(part.startswith('_') and not part.startswith('__') for part in dotted.split('.'))


def test_nesting_counts_blocks():
    tree = ast.parse('def f():\n if a:\n  for b in c:\n   pass\n elif d:\n  pass\n elif e:\n  pass').body[0]
    assert nesting(tree) == 2
