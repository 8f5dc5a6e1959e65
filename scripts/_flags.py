"""Flags from the configuration's dataclasses: one for each field, grouped by section.

They stand in a `FlagValues` of their own, so they never clash with flags that a user's model defines globally.
"""

import ast
import dataclasses
import os
import re
import textwrap
import time
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow.compat.v1 as tf
from absl import flags, logging

from scripts import _recipe
from towers import config as config_lib

RECORD = 'flags.txt'
_POLL_SECS = 0.5
_WORDS = {'true': True, 'false': False}
_WANTED = {'int': 'a whole number', 'float': 'a number', 'bool': 'true or false'}


class _NumbersParser(flags.ArgumentParser[list[float]]):
    """Numbers between commas, floats or whole ones."""

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def parse(self, argument: Any) -> list[float]:
        return [self._kind(entry) for entry in argument.split(',') if entry] if isinstance(argument, str) else argument

    def flag_type(self) -> str:
        return f'{"whole " if self._kind is int else ""}numbers with commas between them'


@dataclasses.dataclass(frozen=True)
class Option:
    """One flag.

    Attributes:
      name: the flag's name.
      default: its value where it is not given; None where the kind allows it.
      doc: one line.
      kind: bool, int, float, str, a Literal of strings, a tuple of strings, floats or whole numbers; any of them or None.
    """

    name: str
    default: Any
    doc: str
    kind: Any = str


def define() -> flags.FlagValues:
    """The flags that every command has: what to train, and each field of `towers.Config`."""
    values = flags.FlagValues()
    section = 'Model and data: what is trained.'
    add(
        values,
        section,
        Option(
            'model',
            'lenet',
            'of the zoo, with its recipe for optimizer and schedule where they are not given; or yours as package.module:function',
        ),
    )
    add_repeated(values, section, 'model_args', "the model's sizes: width=64,layers=(2,3); may be given again")
    add(
        values,
        section,
        Option('dataset', 'digits', 'of the zoo, or yours as package.module:function'),
        Option('eval_dataset', None, "what is evaluated, named like --dataset, or none; the zoo dataset's test examples if not given"),
        Option('data_dir', None, "folder with the zoo dataset's files"),
        Option('max_bad_records', 0, 'damaged records or images to leave out, of tfrecord and images; more are an error', kind=int),
    )
    add_repeated(values, section, 'code_dir', 'folder of your own modules, before the current one; may be given again')
    add_repeated(values, section, 'data_args', "further arguments of the zoo's dataset: size=64; may be given again")
    hosts = Option(
        'hosts_file', None, 'file with the hosts of --worker_hosts, one a line; TF_CONFIG and Slurm are looked at without either'
    )
    add(values, 'Cluster file: another way to name the machines.', hosts)
    for part in config_lib.SECTIONS:
        hints = typing.get_type_hints(part)
        section = (part.__doc__ or part.__name__).splitlines()[0]
        for field in dataclasses.fields(part):
            if field.metadata.get('repeated'):
                add_repeated(values, section, field.name, field.metadata['doc'])
            else:
                add(values, section, Option(field.name, field.default, field.metadata['doc'], hints[field.name]))
    return values


def add(values: flags.FlagValues, section: str, *options: Option) -> None:
    """Defines flags under a heading of --help."""
    for option in options:
        flags.DEFINE_flag(_flag(option), values, module_name=section)


def add_repeated(values: flags.FlagValues, section: str, name: str, doc: str) -> None:
    """Defines a flag that may be given again under a heading of --help; its value is a list."""
    repeated: flags.Flag[Any] = flags.MultiFlag(flags.ArgumentParser(), flags.ArgumentSerializer(), name, [], doc)
    flags.DEFINE_flag(repeated, values, module_name=section)


def _flag(option: Option) -> flags.Flag[Any]:
    name, default, doc, kind = option.name, option.default, option.doc, option.kind
    if isinstance(kind, types.UnionType):
        kind = next(part for part in typing.get_args(kind) if part is not types.NoneType)
    if kind is bool:
        return flags.BooleanFlag(name, default, doc)
    if typing.get_origin(kind) is typing.Literal:
        return flags.EnumFlag(name, default, doc, typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        entry = typing.get_args(kind)[0]
        parser = flags.ListParser() if entry is str else _NumbersParser(entry)
        return flags.Flag(parser, flags.CsvListSerializer(','), name, list(default), doc)
    parser = {int: flags.IntegerParser, float: flags.FloatParser, str: flags.ArgumentParser}[kind]()
    return flags.Flag(parser, flags.ArgumentSerializer(), name, default, doc)


def parse(values: flags.FlagValues, argv: Sequence[str]) -> None:
    """Sets the flags from a command line, `--flagfile=FILE` included.

    Raises:
      ValueError: an unknown flag (with near names), a value of the wrong kind, a missing file, a stray argument.
    """
    try:
        rest = values(list(argv))[1:]
    except flags.IllegalFlagValueError as error:
        raise ValueError(_illegal(values, str(error))) from error
    except flags.Error as error:
        text = str(error).removeprefix('ERROR:: ').replace(' ?', '?').rstrip('.')
        raise ValueError(f'{text}{"" if text.endswith("?") else "."} --help lists the flags.') from error
    if rest:
        raise ValueError(f'Arguments without a flag: {" ".join(rest)}; write --name=value, and lists with commas and no blanks.')


def to_config(values: flags.FlagValues, recipe: Mapping[str, Any] | None = None) -> config_lib.Config:
    """The configuration that the flags ask for; the run directory is runs/<model>-<dataset> where none is given.

    Args:
      values: parsed.
      recipe: fields of a Config that suit the model, of which `_recipe.fields` says what is taken.

    Raises:
      ValueError: values that can't be right together.
    """
    fields = {field.name: getattr(values, field.name) for part in config_lib.SECTIONS for field in dataclasses.fields(part)}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    if recipe:
        fields.update(_recipe.fields(values, recipe))
    if fields['model_dir'] is None:
        fields['model_dir'] = os.path.join('runs', re.sub(r'[^\w.-]', '.', f'{values.model}-{values.dataset}'))
    return config_lib.Config(**fields)


def with_record(fresh: flags.FlagValues, values: flags.FlagValues, argv: Sequence[str]) -> flags.FlagValues:
    """The flags that the run in --model_dir recorded, under those of the command line.

    Args:
      fresh: the same flags as `values`, not parsed yet.
      values: parsed from `argv`.
      argv: the command line.

    Returns:
      `fresh`, parsed; `values` where the run directory holds no record.
    """
    return recorded(fresh, values, str(to_config(values).model_dir), argv)


def recorded(fresh: flags.FlagValues, values: flags.FlagValues, folder: str, argv: Sequence[str]) -> flags.FlagValues:
    """As `with_record`, with the record in `folder`."""
    record = os.path.join(folder, RECORD)
    if not os.path.exists(record):
        return values
    parse(fresh, [argv[0], f'--flagfile={record}', *argv[1:]])
    return fresh


def await_record(values: flags.FlagValues, secs: float) -> None:
    """Waits until a training has recorded its flags in --model_dir, `secs` seconds at most, unless --model says what is trained."""
    record = os.path.join(str(values.model_dir), RECORD)
    if values['model'].present or values.model_dir is None or os.path.exists(record):
        return
    logging.info('Waiting for a training to begin in %s.', values.model_dir)
    end = time.monotonic() + secs
    while time.monotonic() < end and not os.path.exists(record):
        time.sleep(_POLL_SECS)


def arguments(values: flags.FlagValues, flag: str) -> dict[str, Any]:
    """The keyword arguments of --model_args or --data_args (`flag`): literals, true and false, and other bare words as strings.

    Raises:
      ValueError: an entry is not name=value.
    """
    args: dict[str, Any] = {}
    for entry in values[flag].value or ():
        try:
            call = ast.parse(f'dict({entry})', mode='eval').body
            if not isinstance(call, ast.Call) or call.args or not all(word.arg for word in call.keywords):
                raise ValueError
            for word in call.keywords:
                name = word.value.id if isinstance(word.value, ast.Name) else None
                args[str(word.arg)] = ast.literal_eval(word.value) if name is None else _WORDS.get(name, name)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f'--{flag} wants name=value, got {entry!r}; e.g. --{flag}=width=64,layers=(2,3).') from error
    return args


def help_text(values: flags.FlagValues, doc: str) -> str:
    """What --help shows: the command's doc and the flags by section, those that all commands have after its own."""
    shared = define().flags_by_module_dict()
    sections = sorted(values.flags_by_module_dict().items(), key=lambda pair: pair[0] in shared)
    lines = [doc.strip(), '', 'Flags, each as --name=value; --flagfile=FILE reads them from a file, a line each, and later ones win.']
    for section, group in sections:
        lines += ['', section]
        for flag in group:
            lines += _help_lines(flag)
    return '\n'.join(lines)


class Record(tf.train.SessionRunHook):
    """Writes the flags beside the checkpoints once a session is there, as a file that --flagfile reads.

    An evaluation by another process, started in another folder, learns from it which model and data it has before it.

    Args:
      values: the flags.
      model_dir: where to write.
      instead: values to write for some flags instead of their own.
    """

    def __init__(self, values: flags.FlagValues, model_dir: str, instead: Mapping[str, Sequence[str]]) -> None:
        lines = [line for line in values.flags_into_string().splitlines() if line[2:].partition('=')[0] not in instead]
        lines += [f'--{name}={value}' for name, chosen in instead.items() for value in chosen]
        self._text = '\n'.join(lines) + '\n'
        self._path = os.path.join(model_dir, RECORD)

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        with open(f'{self._path}.tmp', 'w', encoding='utf-8') as file:
            file.write(self._text)
        os.replace(f'{self._path}.tmp', self._path)


def _help_lines(flag: flags.Flag[Any]) -> list[str]:
    doc = re.sub(r';\s+repeat this option.*', '', flag.help or '', flags=re.DOTALL)
    name = f'--{flag.name}'
    if flag.boolean:
        name, doc = f'--[no]{flag.name}', doc + (' (on)' if flag.value else '')
    elif flag.value not in (None, []):
        name = flag.serialize()
    if isinstance(flag, flags.EnumFlag):
        doc = f'{doc.partition(">: ")[2]} ({", ".join(flag.parser.enum_values)})'
    first, *more = textwrap.wrap(doc, 84)
    column = f'  {name:32} ' if len(name) <= 32 else f'  {name}\n  {"":32} '
    return [column + first, *(f'  {"":32} {line}' for line in more)]


def _illegal(values: flags.FlagValues, message: str) -> str:
    found = re.match(r'flag --(\w+)=(.*?): ', message, re.DOTALL)
    if not found:
        return message
    flag = values[found[1]]
    kind = flag.parser.flag_type()
    wanted = f'one of {", ".join(flag.parser.enum_values)}' if isinstance(flag, flags.EnumFlag) else _WANTED.get(kind, kind)
    return f'--{flag.name} wants {wanted}, got {found[2]!r}; --help says what it means.'
