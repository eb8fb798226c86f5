"""Shared by the learners of action values, DQN and R2D2."""
