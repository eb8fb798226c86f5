"""Parallelised Q-network (PQN), Q-learning without replay and without a target network."""
