"""Soft actor-critic (SAC)."""
