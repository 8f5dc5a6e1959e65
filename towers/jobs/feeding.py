"""The input of a training program, from the user's dataset: the same for all machines, or in shards."""

from collections.abc import Sequence

import tensorflow.compat.v1 as tf

from towers import config as config_lib
from towers import structs
from towers.input import cutting, inputs, shards
from towers.jobs import connecting


def source(
    dataset: structs.Dataset, config: config_lib.Config, site: connecting.Site, *, shard_examples: Sequence[int] | None = None
) -> structs.Input:
    """The training input on a site, in the current graph.

    Args:
      dataset: zero-argument function that returns a tf.data.Dataset of single examples.
      config: batch size, shards and all else.
      site: where it is read.
      shard_examples: of each shard, where an earlier session of the run has counted them.

    Raises:
      ValueError: dataset and configuration don't fit together.
    """
    towers = site.placement.towers
    opened = inputs.open_source(dataset, host=towers[0].host, proto=site.proto, target=site.target)
    if not config.input_shards:
        return inputs.training(opened, config, towers)
    hosts = list(dict.fromkeys(tower.host for tower in towers))
    with tf.Session(site.target, graph=tf.get_default_graph(), config=site.proto) as session:
        with tf.name_scope('shards'), tf.device(hosts[0]):
            cut = cutting.cut(opened.passes, config.input_shards, hosts, ask=session.run, known=shard_examples)
    return shards.training(cut, config, towers, seed=config.seed)
