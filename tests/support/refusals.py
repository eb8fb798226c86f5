"""Bad input of every kind: command lines that must be refused, and what they print.

`python tests/support/refusals.py FILE` writes the messages of this version into the golden FILE, "now"; "was" stays.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import commands

# Overrides of the configs below.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "sac": (
        "algorithm.gama=0.9",
        "algorithm.gamma=2",
        "algorithm.name=sacc",
        "algorithm.name=3",
        "algorithm.name=dqn",
        "algorithm.learning_rate=fast",
        "algorithm.network=nowhere.module:make",
        "algorithm.network=convolutional",
        "algorithm.n_step=600",
        "env.id=LunarLanderContinous-v3",
        "env.id=my_pkg.envs:make",
        "env.id=json:loads",
        "env.id=a:b:c",
        "env.num_envs=0",
        "env.num_envs=1.5",
        "env.kwargs={no_such: 1}",
        "env.atari.sticky=0.25",
        "env.max_episode_steps=-1",
        "evn.id=CartPole-v1",
        "learner.checkpoint_every_s=0",
        "name=Big_Name",
        "on_policy.max_staleness=2",
        "priority=urgent",
        "replay.capacity=0",
        "replay.capacity=100",
        "replay.max_bytes=1kB",
        "replay.max_bytes=70000",
        "replay.observations=compressed",
        "replay.threads=4",
        "replay.warmup_steps=10000000",
        "replay.samples_per_insert=-1",
        "replay.slack_steps=1",
        "rollout.fragment_s=10",
        "rollout.segment_s=soon",
        "rollout.max_fragment_steps=70000",
        "seed=-1",
        "stop.time=later",
        "stop=5",
        "stop.time.x=5",
        "weight=0",
        "weights.keep_last=1",
        "novalue",
        "=5",
        "a.=5",
        "algorithm.gamma=[",
    ),
    "ppo": (
        "algorithm.estimator=gea",
        "algorithm.batch_size=1",
        "algorithm.minibatch_size=100000",
        "algorithm.epochs=0",
        "env.num_envs=4096",
        "learner.lockstep=true",
        "on_policy.collect=later",
        "on_policy.stale=correct",
        "on_policy.forced_lag=3",
        "replay.capacity=5",
        "rollout.action_noise=0.1",
        "rollout.random_until_learned=true",
        "algorithm.network=nature",
        "replay.observations=dense",
        "replay.threads=2",
        "replay.memory_bytes=1GiB",
        "replay.samples_per_insert=4",
    ),
    "dqn": (
        "algorithm.distribution=gauss",
        "algorithm.epsilon_final=2",
        "algorithm.n_step=0",
        "algorithm.num_atoms=1",
        "algorithm.target_period=0",
        "env.id=LunarLanderContinuous-v3",
        "env.id=ALE/NoSuchGame-v5",
        "env.id=ALE/Pong-v5",
        "rollout.action_noise=0.1",
        "algorithm.network=nature",
        "algorithm.priority_exponent=0.7",
        "algorithm.double_q=true",
        "env.frame_stack=0",
        "env.frame_stack=17",
        "env.id=ALE/Asterics-v5",
        "env.reward_sign=maybe",
        "env.reward_signs=true",
        "on_policy.max_staleness=4",
        "replay.memory_bytes=1GiB",
        "replay.memory_bytes=1KiB",
        "replay.observations=packed",
        "replay.threads=-1",
    ),
    "catch": (
        "algorithm.network=mlp",
        "env.action_repeat=0",
        "replay={observations: dense, threads: 0}",
        "replay={capacity: 10000, threads: 2}",
        "replay={observations: dense, memory_bytes: 1GiB}",
        "replay={observations: compressed, memory_bytes: 1GiB}",
    ),
    "spot": ("env.frame_stack=4",),
    "asterix": ("env.action_repeat=4", "env.id=ALE/Xyzzyx-v5"),
    "target": ("algorithm.name=dqn", "algorithm.name=impala2"),
    "pairs": ("algorithm.name=r2d2",),
    "r2d2": (
        "algorithm.burn_in=-1",
        "algorithm.overlap=1000",
        "algorithm.n_step=200",
        "algorithm.sequence_length=0",
        "replay.capacity=50",
        "rollout.max_fragment_steps=1",
        "rollout.random_until_learned=true",
        "rollout.action_noise=0.1",
        "on_policy.max_staleness=4",
        "replay.memory_bytes=1GiB",
        "replay={samples_per_insert: 1, slack_steps: 100}",
        "env.id=ddrl/Catch-v0",
    ),
}

CONFIGS: dict[str, dict[str, Any]] = {
    "sac": {"env": {"id": "LunarLanderContinuous-v3"}, "algorithm": {"name": "sac"}},
    "ppo": {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "ppo"}},
    "dqn": {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn"}},
    "r2d2": {"env": {"id": "CartPole-v1"}, "algorithm": {"name": "r2d2"}},
    "catch": {"env": {"id": "ddrl/Catch-v0"}, "algorithm": {"name": "dqn", "network": "nature"}},
    "spot": {"env": {"id": "ddrl/Spot-v0"}, "algorithm": {"name": "dqn", "network": "conv"}},
    "asterix": {"env": {"id": "ALE/Asterix-v5"}, "algorithm": {"name": "dqn", "network": "nature"}},
    "target": {"env": {"id": "ddrl/Target-v0"}, "algorithm": {"name": "sac"}},
    "pairs": {"env": {"id": "ddrl/Pairs-v0"}, "algorithm": {"name": "ppo"}},
}

# Command lines; RUN is an active run, ENDED a stopped one.
COMMANDS: tuple[str, ...] = (
    "submit nowhere.yaml",
    "submit empty.yaml",
    "submit broken.yaml",
    "submit list.yaml",
    "submit .",
    "submit sac.yaml --time never",
    "submit sac.yaml --time -5s",
    "submit sac.yaml --weight 0",
    "submit sac.yaml --weight heavy",
    "submit sac.yaml --priority urgent",
    "submit sac.yaml --seed -1",
    "submit sac.yaml --seeds 0",
    "submit sac.yaml --workers -1",
    "submit sac.yaml --from nowhere.safetensors",
    "submit sac.yaml --from broken.yaml",
    "submit sac.yaml --from RUN@99",
    "submit sac.yaml --from nobody@1",
    "submit",
    "submit sac.yaml --no-such-option",
    "no-such-command",
    "status nobody",
    "watch nobody",
    "logs nobody",
    "logs RUN --follow --json",
    "journal nobody",
    "audit nobody",
    "stop nobody",
    "stop ENDED",
    "pause ENDED",
    "resume nobody --no-learner --workers 0",
    "resume RUN --time never",
    "delete RUN --yes",
    "delete ENDED",
    "delete nobody --yes",
    "set RUN",
    "set RUN novalue",
    "set RUN weight=[1",
    "set RUN algorithm.lerning_rate=1",
    "set RUN learning_rate=1",
    "set RUN stop.tmie=1",
    "set RUN env.kwargs.wind=1",
    "set RUN priority=huge",
    "set RUN weight=2 algorithm.learning_rate=-1",
    "set RUN replay.max_bytes=65536",
    "set RUN x=1",
    "set RUN weight=0",
    "set RUN weight=1 weight=2",
    "set RUN algorithm.name=ppo",
    "set RUN algorithm.hidden_sizes=[8]",
    "set RUN algorithm=5",
    "set RUN stop=5",
    "set RUN algorithm.gamma=2",
    "set ENDED weight=2",
    "set nobody weight=2",
    "compare RUN",
    "compare RUN RUN",
    "compare RUN ENDED --output curves.txt",
    "compare RUN nobody",
    "evaluate nobody",
    "evaluate RUN",
    "evaluate RUN@99",
    "evaluate RUN@x",
    "evaluate nowhere.safetensors",
    "evaluate broken.yaml",
    "evaluate RUN --episodes 0",
    "evaluate RUN --epsilon 2",
    "export RUN --output x.safetensors",
    "export nobody --output x.safetensors",
    "learner nobody",
    "learner ENDED",
    "learner --take-over nobody",
    "worker --processes 0",
    "up",
    "up --listen nonsense",
    "prune",
    "prune --older-than soon",
    "prune --max-bytes much",
)


def outcomes() -> Iterator[tuple[str, int, str]]:
    """Yield (command line, exit code, stderr without ids, paths and times) of every case, on the server at hand.

    The current folder gets the files that the cases name.
    """
    import yaml

    for name, tree in CONFIGS.items():
        Path(f"{name}.yaml").write_text(yaml.safe_dump(tree))
    Path("empty.yaml").write_text("")
    Path("broken.yaml").write_text("env: {id: [")
    Path("list.yaml").write_text("- a\n- b\n")
    bare = ["--detach", "--no-learner", "--workers", "0", "--json"]
    runs = [json.loads(commands.run("submit", "sac.yaml", *bare).out)["run"] for _ in range(2)]
    commands.run("stop", runs[1])
    cases = [(line, line.split()) for line in COMMANDS]
    for name, texts in OVERRIDES.items():
        cases += [
            (f"submit {name}.yaml -s {text}", ["submit", f"{name}.yaml", "-s", text, *bare]) for text in texts
        ]
    for line, words in cases:
        given = [word.replace("RUN", runs[0]).replace("ENDED", runs[1]) for word in words]
        code, _, error = commands.run(*given)
        error = error.replace(runs[0], "RUN").replace(runs[1], "ENDED")
        error = re.sub(r"(unix|redis)://\S+", "URL", error)
        yield line, code, error.strip()


if __name__ == "__main__":
    golden = Path(sys.argv[1]).resolve()
    former = {row["line"]: row for row in json.loads(golden.read_text("utf-8"))} if golden.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        rows = [
            {"line": line, "code": code, "was": former.get(line, {}).get("was", error), "now": error}
            for line, code, error in outcomes()
        ]
        os.chdir("/")
    golden.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
