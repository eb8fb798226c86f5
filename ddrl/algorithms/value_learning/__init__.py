"""Shared by the learners of action values: DQN, R2D2 and PQN."""
