"""The machine that learns: the training loop and its reports to the server."""
