"""Behaviour cloning (BC): a policy that acts as the data do."""
