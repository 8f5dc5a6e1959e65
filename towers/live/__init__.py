"""The variables of a training at work, for evaluators on the same machine: served from its memory, without disk."""
