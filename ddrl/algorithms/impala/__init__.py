"""IMPALA, an actor-critic with V-trace."""
