"""Environments: the only package that imports gymnasium (inside functions, so importing this is cheap)."""

from ddrl.envs.make import check_spaces as check_spaces
from ddrl.envs.make import describe as describe
from ddrl.envs.make import episode_metrics as episode_metrics
from ddrl.envs.make import make_one as make_one
from ddrl.envs.make import make_vector as make_vector
from ddrl.envs.make import training_reward as training_reward
from ddrl.envs.make import two_player_game as two_player_game
from ddrl.envs.requirements import EnvError as EnvError
from ddrl.envs.requirements import capabilities as capabilities
from ddrl.envs.requirements import prepare as prepare
from ddrl.envs.requirements import queue_for as queue_for
from ddrl.envs.requirements import queues as queues
from ddrl.envs.requirements import requirement as requirement
