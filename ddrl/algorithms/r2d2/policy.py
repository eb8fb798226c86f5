"""The policy of R2D2."""

from ddrl.algorithms.value_learning.policy import Policy as Policy
