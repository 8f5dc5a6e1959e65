"""As much of tf_cnn_benchmarks' module of this name as the benchmark has to do with."""

import tensorflow.compat.v1 as tf
import variable_mgr_util


class VariableMgr:
    def __init__(self, benchmark_cnn):
        self.benchmark_cnn = benchmark_cnn

    def append_apply_gradients_ops(self, gradient_state, opt, grads, training_ops, loss_scale_params):
        assert loss_scale_params.loss_scale is None and not loss_scale_params.enable_auto_loss_scale
        training_ops.append(opt.apply_gradients(grads))


class VariableMgrLocalFetchFromPS(VariableMgr):
    def create_outer_variable_scope(self, device_num):
        return tf.variable_scope('v', reuse=bool(device_num), use_resource=self.benchmark_cnn.params.use_resource_vars)

    def get_devices(self):
        parameters = self.benchmark_cnn.param_server_device
        return [tf.train.replica_device_setter(worker_device=d, ps_device=parameters, ps_tasks=1) for d in self.benchmark_cnn.raw_devices]

    def trainable_variables_on_device(self, rel_device_num, abs_device_num, writable=False):
        return tf.trainable_variables()

    def preprocess_device_grads(self, device_grads):
        return [self.benchmark_cnn.param_server_device], device_grads

    def get_gradients_to_apply(self, device_num, gradient_state):
        return [(variable_mgr_util.mean([g for g, _ in pairs]), pairs[0][1]) for pairs in zip(*gradient_state, strict=True)]

    def get_post_init_ops(self):
        return []


class VariableMgrLocalReplicated(VariableMgr):
    def __init__(self, benchmark_cnn, all_reduce_spec, agg_small_grads_max_bytes, agg_small_grads_max_group, allreduce_merge_scope):
        super().__init__(benchmark_cnn)
        assert not all_reduce_spec

    def create_outer_variable_scope(self, device_num):
        return tf.variable_scope(f'v{device_num}', use_resource=self.benchmark_cnn.params.use_resource_vars)

    def get_devices(self):
        return self.benchmark_cnn.raw_devices

    def trainable_variables_on_device(self, rel_device_num, abs_device_num, writable=False):
        return [variable for variable in tf.trainable_variables() if variable.name.startswith(f'v{abs_device_num}/')]

    def preprocess_device_grads(self, device_grads):
        with tf.device('/cpu:0'):
            sums = [tf.add_n([gradient for gradient, _ in pairs]) for pairs in zip(*device_grads, strict=True)]
        return self.benchmark_cnn.devices, [list(zip(sums, [v for _, v in pairs], strict=True)) for pairs in device_grads]

    def get_gradients_to_apply(self, device_num, gradient_state):
        return gradient_state[device_num]

    def get_post_init_ops(self):
        first = {variable.op.name: variable for variable in tf.global_variables() if variable.op.name.startswith('v0/')}
        others = [variable for variable in tf.global_variables() if variable.op.name not in first]
        return [variable.assign(first[f'v0/{variable.op.name.partition("/")[2]}']) for variable in others]
