"""The algorithms: a folder each, and what several of them share.

To add the algorithm `<name>`, make the folder `ddrl/algorithms/<name>/` with three modules: `config` has `Config` (an
`AlgorithmConfig`), `policy` has `Policy`, and `learner` has `make_learner`, which only learners import; `base` describes
the last two. `config`, and `policy` where it can do without, do not import torch: that is seconds of a process's start
and most of its memory. Nothing is registered: a run's config names the folder. Then add its tests to
`tests/algorithms/`, a preset to `configs/`, a section to `docs/algorithms.md`, and its options to
`docs/configuration.md` by `make docs`.
"""
