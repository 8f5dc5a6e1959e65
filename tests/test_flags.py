import dataclasses
import pickle
import sys
import textwrap
import threading
import time

import pytest

import models
from scripts import _flags, _main, _own, _recipe, _zoo
from towers import config, errors


def parsed(*arguments):
    values = _flags.define()
    _flags.parse(values, ['train.py', *arguments])
    return values


def test_without_flags_the_config_is_the_default_one():
    made = _flags.to_config(parsed())
    assert made == dataclasses.replace(config.Config(), model_dir='runs/lenet-digits')


@pytest.mark.parametrize(
    ('arguments', 'expected', 'said'),
    [
        ([], 'adam 0.001 piecewise 120000,240000', '--optimizer=adam --learning_rate=0.001 --schedule=piecewise '),
        (['--seed=3'], 'adam 0.001 piecewise 120000,240000', '--optimizer=adam'),
        (['--optimizer=adam'], 'adam 0.001 piecewise 120000,240000', '--learning_rate=0.001 --schedule=piecewise '),
        (['--learning_rate=0.5'], 'adam 0.5 piecewise 120000,240000', '--optimizer=adam --schedule=piecewise '),
        (['--schedule=piecewise', '--schedule_unit=examples'], 'adam 0.001 piecewise 120000,240000', '--optimizer=adam'),
        (['--optimizer=sgd'], 'sgd 0.05 constant ', 'nothing is taken (for --optimizer=adam); used: --learning_rate=0.05 --sche'),
        (
            ['--schedule=constant'],
            'adam 0.001 constant ',
            '--optimizer=adam --learning_rate=0.001; its schedule is not taken, as --schedule is given.',
        ),
        (
            ['--schedule=piecewise', '--boundaries=3,4'],
            'adam 0.001 piecewise 3,4',
            '--optimizer=adam --learning_rate=0.001; its schedule is not taken, as --boundaries is given.',
        ),
        (['--optimizer=adam', '--learning_rate=0.1', '--schedule=constant'], 'adam 0.1 constant ', 'nothing is taken; its schedule'),
        (['--model=mlp'], 'momentum 0.05 constant ', None),
    ],
)
def test_a_models_recipe_fills_what_is_not_given_unless_it_is_for_something_else(arguments, expected, said, monkeypatch):
    lines = []
    monkeypatch.setattr(_recipe.logging, 'info', lambda text, *args: lines.append(text % args))
    values = parsed(*arguments)
    made = _flags.to_config(values, _zoo.load(values).recipe)
    boundaries = ','.join(f'{value:g}' for value in made.boundaries)
    assert f'{made.optimizer} {made.learning_rate:g} {made.schedule} {boundaries}' == expected
    assert len(lines) == (said is not None)
    assert said is None or lines[0].startswith(f'Recipe of lenet: {said}')


@pytest.mark.parametrize('arguments', [[], ['--optimizer=sgd'], ['--schedule=constant'], ['--model=resnet20', '--l2=0'], ['--model=mlp']])
def test_the_recorded_flags_make_the_same_run_again(arguments, tmp_path):
    values = parsed(f'--model_dir={tmp_path}', *arguments)
    recipe = _zoo.load(values).recipe
    made = _flags.to_config(values, recipe)
    _flags.Record(values, str(tmp_path), _recipe.recorded(made, recipe)).after_create_session(None, None)
    assert _flags.to_config(parsed(f'--flagfile={tmp_path / _flags.RECORD}'), recipe) == made


@pytest.mark.parametrize('name', models.RECIPES)
def test_recipes_are_configurations(name):
    assert name in models.MODELS
    config.Config(**models.RECIPES[name])


@pytest.mark.parametrize(
    ('flag', 'name', 'value'),
    [
        ('--num_gpus=4', 'num_gpus', 4),
        ('--learning_rate=1e-3', 'learning_rate', 0.001),
        ('--clip_norm=2', 'clip_norm', 2.0),
        ('--device=cpu', 'device', 'cpu'),
        ('--histograms', 'histograms', True),
        ('--noexact_resume', 'exact_resume', False),
        ('--allow_changed=a/.*,b', 'allow_changed', ('a/.*', 'b')),
        ('--allow_changed=', 'allow_changed', ()),
        ('--schedule=piecewise --boundaries=30,60.5', 'boundaries', (30.0, 60.5)),
        ('--save_steps=0', 'save_steps', 0),
        ('--model_dir=/tmp/x', 'model_dir', '/tmp/x'),
        ('--model=my.module:fn', 'model_dir', 'runs/my.module.fn-digits'),
    ],
)
def test_a_flag_sets_its_field(flag, name, value):
    found = getattr(_flags.to_config(parsed(*flag.split())), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--num_gpu=4'], "Unknown command line flag 'num_gpu'. Did you mean: num_gpus? --help lists the flags."),
        (['--wolf=4'], "Unknown command line flag 'wolf'. --help lists the flags."),
        (['--num_gpus=x'], "--num_gpus wants a whole number, got 'x'; --help says what it means."),
        (['--momentum=x'], "--momentum wants a number, got 'x'; --help says what it means."),
        (['--device=tpu'], "--device wants one of auto, gpu, cpu, got 'tpu'; --help says what it means."),
        (['--evaluate=maybe'], "--evaluate wants true or false, got 'maybe'; --help says what it means."),
        (['--boundaries=1,b'], "--boundaries wants numbers with commas between them, got '1,b'; --help says what it means."),
        (['--num_gpus'], 'Missing value for flag --num_gpus. --help lists the flags.'),
        (['--flagfile=/none'], "Unable to open flagfile: [Errno 2] No such file or directory: '/none'. --help lists the flags."),
        (['4', 'gpus'], 'Arguments without a flag: 4 gpus; write --name=value, and lists with commas and no blanks.'),
    ],
)
def test_a_wrong_command_line_is_one_line_that_says_what_to_do(arguments, message):
    with pytest.raises(ValueError) as error:
        parsed(*arguments)
    assert str(error.value) == message


def test_a_flagfile_is_read_and_later_flags_win(tmp_path):
    file = tmp_path / 'flags'
    file.write_text('# a comment\n--num_gpus=3\n\n--seed=5\n--nohistograms\n')
    made = _flags.to_config(parsed(f'--flagfile={file}', '--seed=7'))
    assert (made.num_gpus, made.seed, made.histograms) == (3, 7, False)


def test_the_recorded_flags_come_back_and_the_command_line_wins(tmp_path):
    arguments = [
        '--num_gpus=2',
        '--schedule=piecewise',
        '--boundaries=1,2',
        '--allow_changed=a,b',
        '--model_args=conv1=8',
        f'--model_dir={tmp_path}',
        '--images',
    ]
    values = parsed(*arguments)
    _flags.Record(values, str(tmp_path), {}).after_create_session(None, None)
    again = ['evaluate.py', f'--model_dir={tmp_path}', '--num_gpus=1', '--model_args=dense=16']
    found = _flags.with_record(_flags.define(), parsed(*again[1:]), again)
    assert _flags.to_config(found) == dataclasses.replace(_flags.to_config(values), num_gpus=1)
    assert _flags.arguments(found, 'model_args') == {'conv1': 8, 'dense': 16}


def test_without_a_record_the_command_line_stands_alone(tmp_path):
    values = parsed(f'--model_dir={tmp_path}')
    assert _flags.with_record(_flags.define(), values, ['x']) is values


@pytest.mark.parametrize(
    ('entries', 'args'),
    [
        ([], {}),
        (['width=64'], {'width': 64}),
        (['width=64,sizes=(2,3),name=relu'], {'width': 64, 'sizes': (2, 3), 'name': 'relu'}),
        (['a=1', "b='x y'", 'a=-2.5'], {'a': -2.5, 'b': 'x y'}),
        (['on=True,none=None,off=false'], {'on': True, 'none': None, 'off': False}),
    ],
)
def test_model_args_are_literals_and_words(entries, args):
    assert _flags.arguments(parsed(*(f'--model_args={entry}' for entry in entries)), 'model_args') == args


@pytest.mark.parametrize('entry', ['64', 'width', 'width=', 'a=1 b=2', 'a=f(1)', '**x', 'a=1)+dict(b=2'])
def test_other_model_args_are_refused(entry):
    with pytest.raises(ValueError, match='--model_args wants name=value, got '):
        _flags.arguments(parsed(f'--model_args={entry}'), 'model_args')


def test_help_shows_every_flag_under_its_section():
    text = _flags.help_text(_flags.define(), 'Does it.')
    titles = [section.__doc__.splitlines()[0] for section in config.SECTIONS]
    assert [line for line in text.splitlines() if line in titles] == titles
    for name in _flags.define():
        assert f'--{name}' in text or f'--[no]{name}' in text
    assert max(map(len, text.splitlines())) <= 121


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's module `own_work` in a folder on the path."""
    (tmp_path / 'own_work.py').write_text(
        textwrap.dedent("""
        def model(batch, *, training, width=3):
            return width

        def train():
            return 'train'

        def fails(batch, *, training):
            raise ValueError('of the user')

        NUMBER = 3
        """)
    )
    (tmp_path / 'own_broken.py').write_text('import not_there_at_all\n')
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop('own_work', None)


def test_own_functions_are_found_and_bound(own):
    work = _zoo.load(parsed('--model=own_work:model', '--model_args=width=7', '--dataset=own_work:train'))
    assert work.model(None, training=True) == 7
    assert work.dataset() == 'train'
    assert work.eval_dataset is None
    assert pickle.loads(pickle.dumps(work)).model(None, training=True) == 7


def test_an_own_evaluation_dataset_goes_with_any_training_dataset(own):
    assert _zoo.load(parsed('--eval_dataset=own_work:train')).eval_dataset() == 'train'
    assert _zoo.load(parsed('--eval_dataset=none')).eval_dataset is None


def test_the_zoo_is_found_by_name_with_the_classes_of_its_data():
    work = _zoo.load(parsed('--dataset=digits', '--eval_dataset=digits', '--model_args=conv1=8'))
    assert (work.model.keywords['hparams'].classes, work.model.keywords['hparams'].conv1) == (10, 8)
    assert work.eval_dataset is not None
    assert pickle.loads(pickle.dumps(work)).model.func is work.model.func


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--model=lenets'], "Unknown model 'lenets'; did you mean lenet"),
        (['--dataset=digit'], "Unknown dataset 'digit'; did you mean digits"),
        (['--eval_dataset=digit'], "^--eval_dataset=digit: Unknown dataset 'digit'; did you mean digits"),
        (['--evaluator=x:dataset=', '--evaluator=y'], "^--evaluator=x:dataset=: Unknown dataset ''"),
        (['--model=own_work.model'], '--model=own_work.model: expected a name of the zoo or package.module:function; put a colon'),
        (['--model=own_wok:model'], r"--model=own_wok:model: no module 'own_wok' in .* or on the Python path\."),
        (['--model=own_work.sub:model'], "--model=own_work.sub:model: no module 'own_work.sub'"),
        (['--model=own_work:modle'], r"no function 'modle' in .*own_work\.py; it has model\."),
        (['--model=own_work:NUMBER'], "no function 'NUMBER' in "),
        (['--model=own_work:model', '--model_args=depth=2'], r"--model=own_work:model: model\(batch, .*width=3\) is called .*'depth'"),
        (['--model=own_work:train'], r'--model=own_work:train: train\(\) is called with \(batch, training='),
        (['--dataset=own_work:train', '--data_dir=x'], '--data_dir is for datasets of the zoo, got it with --dataset=own_work:train'),
    ],
)
def test_what_is_not_there_is_named(own, arguments, message):
    with pytest.raises(ValueError, match=message):
        _zoo.load(parsed(*arguments))


def test_a_module_that_fails_to_import_shows_its_own_error(own):
    with pytest.raises(ModuleNotFoundError, match='not_there_at_all'):
        _own.find('--model', 'own_broken:model')


def test_a_folder_of_code_comes_first_and_one_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, 'path', list(sys.path))
    for name in ('first', 'second'):
        (tmp_path / name / 'own_package').mkdir(parents=True)
        (tmp_path / name / 'own_package' / '__init__.py').write_text(f'def where():\n    return {name!r}\n')
    given = [str(tmp_path / name) for name in ('first', 'gone', 'second')]
    work = _zoo.load(parsed('--dataset=own_package:where', *(f'--code_dir={folder}' for folder in given)))
    assert work.dataset() == 'second'  # the last one given
    assert work.record == {'code_dir': [str(tmp_path / 'second')]}
    with pytest.raises(ValueError, match=r"no module 'not_own' in .*, in .*first, in .*gone .gone., in .*--code_dir=FOLDER"):
        _zoo.load(parsed('--dataset=not_own:where', *(f'--code_dir={folder}' for folder in given)))
    sys.modules.pop('own_package')


def test_what_is_recorded_is_found_from_any_folder(tmp_path):
    values = parsed('--data_dir=some/where', f'--code_dir={tmp_path}', '--seed=3')
    _flags.Record(values, str(tmp_path), {'data_dir': ['/some/where'], 'code_dir': ['/a', '/b']}).after_create_session(None, None)
    found = _flags.recorded(_flags.define(), values, str(tmp_path), ['evaluate.py', '--code_dir=/c'])
    assert (found.data_dir, found.code_dir, found.seed) == ('/some/where', ['/a', '/b', '/c'], 3)


def test_evaluators_are_declared_one_by_one_with_their_datasets(own):
    texts = ['held:dataset=own_work:train,cadence=newest', 'seen:dataset=train', 'again:nice=3']
    values = parsed('--evaluate', '--dataset=digits', *(f'--evaluator={text}' for text in texts))
    assert _flags.to_config(values).evaluator == tuple(texts)
    work = _zoo.load(values)
    assert list(work.evaluators) == ['test', 'held', 'seen', 'again']
    assert work.evaluators['held']() == 'train' and work.evaluators['seen'] is work.dataset
    assert work.evaluators['again'] is work.evaluators['test'] is work.eval_dataset
    assert len(work.record['code_dir']) == 1
    with pytest.raises(ValueError, match="The evaluator 'a' has nothing to evaluate on, got no --eval_dataset"):
        _zoo.load(parsed('--evaluator=a', '--eval_dataset=none'))
    with pytest.raises(ValueError, match=r"--evaluator=a:dataset=own_wok:x: no module 'own_wok'"):
        _zoo.load(parsed('--evaluator=a:dataset=own_wok:x'))


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError('nothing raised')


@pytest.mark.parametrize(
    ('function', 'code'),
    [
        (lambda: config.Config(num_gpus=0), 2),
        (lambda: parsed('--wolf=1'), 2),
        (lambda: open('/none/at/all'), None),
        (lambda: int('user'), None),
        (lambda: errors.source_line(None), None),
    ],
)
def test_errors_of_ours_are_one_line_and_others_keep_their_traceback(function, code):
    assert _main._code(raised(function)) == code


def test_a_models_own_error_keeps_its_traceback(own):
    model = _zoo.load(parsed('--model=own_work:fails')).model
    assert _main._code(raised(lambda: model(None, training=True))) is None


def test_divergence_and_the_librarys_own_errors_have_their_codes():
    assert _main._code(errors.Diverged('at step 3')) == 3


@pytest.mark.parametrize(('arguments', 'waits'), [([], True), (['--model=mlp'], False)], ids=['no model', 'a model'])
def test_a_record_is_waited_for_where_nothing_else_says_what_is_trained(arguments, waits, tmp_path):
    values = _flags.define()
    values(['evaluate.py', f'--model_dir={tmp_path}', *arguments])
    began = time.monotonic()
    writer = threading.Timer(0.3, (tmp_path / _flags.RECORD).write_text, ['--model=mlp'])
    writer.start()
    _flags.await_record(values, 60.0)
    assert (time.monotonic() - began >= 0.3) == waits
    writer.join()
    _flags.await_record(values, 60.0)


def test_a_commands_own_flags_come_first():
    values = _flags.define()
    _flags.add(values, 'Own: of this command.', _flags.Option('mine', 'x', 'what it is'))
    text = _flags.help_text(values, 'Does it.')
    headings = [line for line in text.splitlines() if line and not line.startswith(' ')][2:]
    assert headings[:2] == ['Own: of this command.', 'Model and data: what is trained.'] and len(headings) == len(set(headings))
