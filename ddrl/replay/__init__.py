"""From the stream to batches.

reader      decodes entries of the stream ahead of the learner
replay      off-policy: the newest items, drawn at random; cut and gathered by transitions or sequences
fifo        on-policy: each fragment once, in order
experience  makes the one that a run's config asks for

Nothing here knows an algorithm or imports torch, and only the reader knows Redis: fragments come in, NumPy arrays
come out. The reader refuses what breaks an invariant of `Fragment` or is outside the spaces and limits of the run; the
others check only what it cannot know.
"""
