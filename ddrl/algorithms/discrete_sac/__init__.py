"""Soft actor-critic over discrete actions, and soft Q-learning (SQN)."""
