"""Distributed in-graph replication for TensorFlow graphs: one model function, N towers, one master session.

flags -> Config -> devices -> inputs -> build -> reduce -> chain -> train_step -> session -> hooks -> writers
             `-> session_config --------------------------------------^  `-> checkpoint -> evaluation
"""

from towers.config import Config
from towers.directory.record import TrainResult
from towers.evaluators.evaluation import evaluate
from towers.jobs.exporting import export
from towers.jobs.predicting import predict
from towers.jobs.replaying import replay
from towers.jobs.training import train
from towers.metrics import accuracy, auc, confusion_matrix, mean, mean_squared_error, perplexity, precision, recall, top_k
from towers.randomness import dropout, random_uniform
from towers.structs import Metric, ModelOutput, Objective

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
