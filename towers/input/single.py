"""Whether a dataset holds single examples, as it must, or batches of them."""

import tensorflow.compat.v1 as tf

_BATCHES = ('BatchDataset', 'ParallelBatchDataset', 'PaddedBatchDataset', 'MapAndBatchDataset')
# What keeps batches as they are; a map too, where each tensor still has an open number of rows.
_KEEP = (
    'Prefetch',
    'Options',
    'Repeat',
    'Shuffle',
    'ShuffleAndRepeat',
    'Take',
    'Skip',
    'Cache',
    'Model',
    'AssertCardinality',
    'Map',
    'ParallelMap',
)


def require(dataset: tf.data.Dataset) -> None:
    """Refuses a dataset that surely is one of batches.

    That is one that `batch` made, or that follows it, in which each tensor has an open number of rows. Batches of a fixed
    size may be meant as examples, such as windows of a text.

    Raises:
      ValueError: with the way out.
    """
    specs = tf.nest.flatten(dataset.element_spec)
    shapes = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
    is_open = [shape.rank is not None and shape.rank > 0 and shape[0] is None for shape in shapes]
    if len(shapes) != len(specs) or not all(is_open) or (len(shapes) == 1 and shapes[0].rank == 1):
        return
    operation = tf.data.experimental.to_variant(dataset).op
    while _name(operation) in (f'{kind}Dataset' for kind in _KEEP):
        operation = operation.inputs[0].op
    if _name(operation) in _BATCHES:
        raise ValueError(
            f'The dataset is batched already ({_name(operation)}; elements are {dataset.element_spec}), expected single examples; leave '
            '`batch` out, or put .unbatch() behind it. A batch that is one example to you needs a fixed size: drop_remainder=True.'
        )


def _name(operation: tf.Operation) -> str:
    return operation.type.partition('DatasetV')[0] + 'Dataset' if 'DatasetV' in operation.type else operation.type
