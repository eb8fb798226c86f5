"""From the stream to batches: windows (endings become discounts), the view, samplers and pacing.

Nothing here knows Redis, torch or an algorithm: fragments come in, NumPy arrays come out.
"""
