"""A machine that plays: the Celery tasks and what they call."""
