"""`towers.export`: a checkpoint as a SavedModel, or as one frozen graph, for those who serve it."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import tensorflow.compat.v1 as tf
from absl import logging

from towers import config as config_lib
from towers import errors, structs
from towers.checkpoint import manifest, snapshot
from towers.evaluators import evaluation
from towers.jobs import inference, joining

SIGNATURE = 'serving_default'
FROZEN = 'frozen_graph.pb'
ABOUT = 'export.json'
_FOLDER = 'export'


def export(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    checkpoint: str | int | None = None,
    frozen: bool = False,
) -> str:
    """Writes a checkpoint's model out of training, for one tower, to `export/<step>/` in the run directory.

    It is a SavedModel with the signature 'serving_default', from the features that the predictions need to the predictions,
    each with the example as first axis. The folder appears whole or not at all, and takes the place of one of that step.

    Args:
      model: `model(batch, *, training) -> ModelOutput` with predictions, as it was trained.
      dataset: whose single examples have the features that the model takes.
      config: `model_dir`, `keep_best`, `eval_device` and threads are used.
      checkpoint: 'final' (the newest whole one, also None), 'best' by `keep_best`, a step, or a prefix.
      frozen: also writes `frozen_graph.pb`, a graph whose variables are constants.

    Returns:
      The folder.

    Raises:
      ValueError: there is no such checkpoint, or the model returns no predictions.
      NotWritten: the disk is full, or the like; nothing is left of what was written.
    """
    model_dir = evaluation.run_directory(config)
    found = inference.checkpoint(config, checkpoint)
    section = config_lib.evaluation_devices(dataclasses.replace(config, eval_num_gpus=1))
    with joining.joined(section, joining.Role('exporter', model_dir=model_dir)) as (section, member):
        made = inference.Inference(model, dataset, config, section)
        member.follow(lambda: found.step)
        folder = os.path.join(model_dir, _FOLDER, str(found.step))
        with tf.Session(graph=made.graph, config=made.proto) as session, made.graph.as_default():
            made.load(session, model_dir, found)
            with _drafted(folder) as draft:
                _write(session, made, draft, frozen=frozen)
                _describe(made, found, os.path.join(draft, ABOUT))
    logging.info('The model of step %d is in %s.', found.step, folder)
    return folder


def _write(session: tf.Session, made: inference.Inference, folder: str, *, frozen: bool) -> None:
    _save(session, made, folder)
    if frozen:
        _freeze(session, made, os.path.join(folder, FROZEN))


def _save(session: tf.Session, made: inference.Inference, folder: str) -> None:
    part = made.parts[0]
    signature = tf.saved_model.build_signature_def(
        {name: tf.saved_model.build_tensor_info(tensor) for name, tensor in part.features.items()},
        {name: tf.saved_model.build_tensor_info(tensor) for name, tensor in part.predictions.items()},
        tf.saved_model.signature_constants.PREDICT_METHOD_NAME,
    )
    builder = tf.saved_model.Builder(folder)
    builder.add_meta_graph_and_variables(
        session,
        [tf.saved_model.tag_constants.SERVING],
        {SIGNATURE: signature},
        assets_collection=tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
        main_op=tf.tables_initializer(),
        clear_devices=True,
    )
    builder.save()


def _freeze(session: tf.Session, made: inference.Inference, path: str) -> None:
    names = [tensor.op.name for tensor in made.parts[0].predictions.values()]
    graph = tf.graph_util.convert_variables_to_constants(session, made.graph.as_graph_def(), names)
    for node in graph.node:
        node.device = ''
    with open(path, 'wb') as file:
        file.write(graph.SerializeToString())


def _describe(made: inference.Inference, found: manifest.Checkpoint, path: str) -> None:
    """What was exported, and the names of a frozen graph's tensors."""
    part = made.parts[0]
    about: dict[str, Any] = {
        'step': found.step,
        'examples': found.manifest.examples,
        'checkpoint': os.path.basename(found.prefix),
        'inputs': {name: _tensor(tensor) for name, tensor in part.features.items()},
        'outputs': {name: _tensor(tensor) for name, tensor in part.predictions.items()},
        'tensorflow': tf.__version__,
    }
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(about, file, indent=1)


def _tensor(tensor: tf.Tensor) -> dict[str, Any]:
    return {'tensor': tensor.name, 'dtype': tensor.dtype.name, 'shape': tensor.shape.as_list() if tensor.shape.rank is not None else None}


@contextlib.contextmanager
def _drafted(folder: str) -> Iterator[str]:
    """A folder to write in, which takes the place of `folder` at the end of the `with` block, and is gone where that fails."""
    draft = f'{folder}.tmp'
    shutil.rmtree(draft, ignore_errors=True)
    try:
        yield draft
        _replace(draft, folder)
    except (OSError, tf.errors.OpError) as error:
        remedy = 'make room there, or let it be written, and export again.'
        raise errors.NotWritten(f'{folder} could not be written ({snapshot.reason(error)}); {remedy}') from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        with contextlib.suppress(OSError):  # another export is there
            os.rmdir(os.path.dirname(folder))


def _replace(draft: str, folder: str) -> None:
    """Puts a finished folder in its place; an older one is gone only then."""
    old = f'{folder}.old'
    shutil.rmtree(old, ignore_errors=True)
    if os.path.exists(folder):
        os.rename(folder, old)
    os.rename(draft, folder)
    shutil.rmtree(old, ignore_errors=True)
