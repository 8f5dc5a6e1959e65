"""See tensorpack/__init__.py."""


class TensorInput:
    def __init__(self, get_tensor_fn):
        self.get_input_tensors = get_tensor_fn
