"""Distributed deep reinforcement learning on Celery and Redis.

Importing this package is cheap on purpose: `celery -A ddrl worker` and `ddrl --help` start with it.
"""

__version__ = "0.1.0"
