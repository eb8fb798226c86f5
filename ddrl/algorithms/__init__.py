"""The algorithms: a folder each, and what several of them share (see `base`)."""
