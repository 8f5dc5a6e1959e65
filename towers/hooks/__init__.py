"""What happens round a step: each file holds one kind of `tf.train.SessionRunHook`, which reads no other hook."""
