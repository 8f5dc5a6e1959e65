"""Distributed in-graph replication for TensorFlow graphs: one model function, N towers, one master session.

flags -> Config -> devices -> inputs -> build -> reduce -> chain -> train_step -> session -> hooks -> writers
             `-> session_config --------------------------------------^  `-> checkpoint -> evaluation
"""

from towers.config import Config
from towers.directory.record import TrainResult
from towers.evaluators.evaluation import evaluate
from towers.exporting import export
from towers.metrics import accuracy, auc, confusion_matrix, mean, mean_squared_error, perplexity, precision, recall, top_k
from towers.predicting import predict
from towers.randomness import dropout, random_uniform
from towers.replaying import replay
from towers.structs import Metric, ModelOutput, Objective
from towers.training import train

__all__ = [
    'Config',
    'Metric',
    'ModelOutput',
    'Objective',
    'TrainResult',
    'accuracy',
    'auc',
    'confusion_matrix',
    'dropout',
    'evaluate',
    'export',
    'mean',
    'mean_squared_error',
    'perplexity',
    'precision',
    'predict',
    'random_uniform',
    'recall',
    'replay',
    'top_k',
    'train',
]
