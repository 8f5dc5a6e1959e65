"""What composes the stages: trainings, evaluation servers, replays, exports, predictions."""
