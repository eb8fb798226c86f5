"""Proximal policy optimization (PPO)."""
