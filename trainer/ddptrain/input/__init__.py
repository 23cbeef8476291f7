"""From samples to what a model sees: on the device at once, or by worker processes; the same batches either way.

Shapes, in all of this room: N samples, B batch, H height, W width, C channels.
"""
