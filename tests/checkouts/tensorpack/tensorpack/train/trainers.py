"""See tensorpack/__init__.py."""

import tensorflow.compat.v1 as tf

from tensorpack.tfutils import tower


class _Callbacks:
    def __init__(self, callbacks):
        self.all = callbacks

    def before_train(self):
        for callback in self.all:
            callback.before_train()


class _Trainer:
    own = False

    def __init__(self, gpus):
        self._gpus = gpus
        self._first = []  # operations before the first step

    def setup_graph(self, input_signature, input, get_cost_fn, get_opt_fn):
        found = []
        for index in range(self._gpus):
            scope = f'tower{index}' if self.own and index else ''
            outer = tf.variable_scope(scope) if scope else tf.variable_scope('', reuse=index > 0)
            with tf.device(f'/gpu:{index}'), outer, tower.entered(tower.TrainTowerContext(index, self.own)):
                given = input.get_input_tensors()
                assert [value.shape for value in given] == [spec.shape for spec in input_signature]
                cost = get_cost_fn(*given)
                current = tower.get_current_tower_context()
                key = tf.GraphKeys.TRAINABLE_VARIABLES
                trained = current.get_collection_in_tower(key) if current.has_own_variables else tf.trainable_variables()
                found.append(get_opt_fn().compute_gradients(cost, trained))
        means = [tf.add_n([gradient for gradient, _ in pairs]) / self._gpus for pairs in zip(*found, strict=True)]
        optimizer, written = get_opt_fn(), found if self.own else found[:1]
        self.train_op = tf.group(*[optimizer.apply_gradients([(m, v) for m, (_, v) in zip(means, p, strict=True)]) for p in written])
        for pairs in written[1:]:
            self._first += [variable.assign(first) for (_, variable), (_, first) in zip(pairs, found[0], strict=True)]

    def setup_callbacks(self, callbacks, monitors):
        assert monitors == []
        self._callbacks = _Callbacks([*callbacks, self])

    def initialize(self, session_creator, session_init):
        hooks = [callback.hook() for callback in self._callbacks.all[:-1]]
        self.sess = session_creator.create_session()
        session_creator.create_session = lambda: self.sess
        self.hooked_sess = tf.train.MonitoredSession(session_creator, hooks=hooks)

    def before_train(self):
        for operation in self._first:
            operation.op.run()


class SyncMultiGPUTrainerParameterServer(_Trainer):
    pass


class SyncMultiGPUTrainerReplicated(_Trainer):
    own = True
