"""See tensorpack/__init__.py."""

from tensorpack.train.trainers import SyncMultiGPUTrainerParameterServer, SyncMultiGPUTrainerReplicated

__all__ = ['SyncMultiGPUTrainerParameterServer', 'SyncMultiGPUTrainerReplicated']
