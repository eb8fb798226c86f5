"""One file an algorithm: its Config, its pure losses, one small class for the learner, one Policy for players."""
