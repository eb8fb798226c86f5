"""Shared by the on-policy actor-critics, PPO and IMPALA."""
