"""`towers.predict`: a checkpoint's predictions for examples from outside, on several towers."""

import atexit
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.evaluators import evaluation
from towers.jobs import inference, joining


def predict(
    model: structs.Model,
    dataset: structs.Dataset,
    config: config_lib.Config,
    *,
    examples: Iterable[Mapping[str, Any]],
    checkpoint: str | int | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the predictions of each example, in the order of the examples, as they are made.

    Args:
      model: `model(batch, *, training) -> ModelOutput` with predictions, as it was trained.
      dataset: whose single examples have the features that the model takes; only its structure is looked at.
      config: `model_dir`, `keep_best`, `eval_batch_size` (of each tower), `eval_num_gpus`, `eval_device` and threads are used.
      examples: name -> value of one example's features; those that the predictions don't need may be left out.
      checkpoint: as in `towers.export`.

    Yields:
      name -> value for one example. Who leaves the loop early may `close()` the generator, to give the session's place back at once;
      else that comes when nothing holds it any more, and at the latest when the process ends.

    Raises:
      ValueError: there is no such checkpoint, an example lacks a feature or has another shape or type.
    """
    model_dir = evaluation.run_directory(config)
    found = inference.checkpoint(config, checkpoint)
    with contextlib.ExitStack() as closing:
        atexit.register(closing.close)  # a generator that is held to the end is collected when no thread can be started or joined
        closing.callback(atexit.unregister, closing.close)
        role = joining.Role('predictor', model_dir=model_dir)
        section, member = closing.enter_context(joining.joined(config_lib.evaluation_devices(config), role))
        member.follow(lambda: found.step)
        made = inference.Inference(model, dataset, config, section)
        session = closing.enter_context(contextlib.closing(tf.Session(graph=made.graph, config=made.proto)))  # not the caller's default
        made.load(session, model_dir, found)
        for batch in _batches(made.parts[0], examples, config.eval_batch_size * len(made.parts)):
            predictions = made.run(session, batch)
            for row in range(len(next(iter(batch.values())))):
                yield {name: values[row] for name, values in predictions.items()}


def _batches(part: inference.Part, examples: Iterable[Mapping[str, Any]], size: int) -> Iterator[dict[str, np.ndarray]]:
    rows: list[dict[str, np.ndarray]] = []
    for number, example in enumerate(examples):
        rows.append({name: _value(name, holder, example, number) for name, holder in part.features.items()})
        if len(rows) == size:
            yield _stacked(rows)
            rows = []
    if rows:
        yield _stacked(rows)


def _stacked(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _value(name: str, holder: tf.Tensor, example: Mapping[str, Any], number: int) -> np.ndarray:
    """One feature of an example as the model takes it."""
    if name not in example:
        raise ValueError(f'Example {number} has {", ".join(example) or "nothing"}, the model needs {name}; give it.')
    try:
        value = np.asarray(example[name], holder.dtype.as_numpy_dtype)
    except (TypeError, ValueError) as error:
        raise ValueError(f'{name} of example {number} is no {holder.dtype.name} ({error}); correct it.') from error
    if not holder.shape[1:].is_compatible_with(value.shape):
        wanted = holder.shape[1:].as_list()
        raise ValueError(f'{name} of example {number} must have the shape {wanted}, got {list(value.shape)}; bring it to that.')
    return value
