"""The machine that learns: the training loop and what the server is told of it."""
