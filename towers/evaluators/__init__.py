"""What follows the checkpoints: evaluations and the processes that make them."""
