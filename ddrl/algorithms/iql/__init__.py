"""Implicit Q-learning (IQL)."""
