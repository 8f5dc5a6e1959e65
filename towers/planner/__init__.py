"""What a program will need: bytes of parameters, slots, activations and transfers before it runs, and measured from a traced step."""
