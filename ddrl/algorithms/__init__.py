"""The algorithms: a folder each, and what several of them share.

A folder with `config.py` is an algorithm, which a run's config names; nothing is registered. A name with a dot is a
module of the user's, which has all three parts (docs/own_algorithm.py is one). To add an algorithm to ddrl, make the
folder `ddrl/algorithms/<name>/` with three modules (`base` describes the last two):

- `config` has `Config`, an `AlgorithmConfig` (see `options`);
- `policy` has `Policy(config, spec, *, producer)`;
- `learner`, imported by learner processes only, has `make_learner(config, spec, *, device, seed)`.

`config`, and `policy` where possible, avoid importing torch, which costs seconds and most of a process's memory. Then
add its tests to `tests/algorithms/`, a preset to `configs/`, a section to `docs/algorithms.md`, and its options to
`docs/configuration.md` by `make docs`.
"""
