"""IQL's policy, which is that of BC."""

from ddrl.algorithms.bc.policy import Policy as Policy
