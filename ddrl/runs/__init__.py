"""A run as people handle it: submit, artifacts, curves, comparison, prune."""
