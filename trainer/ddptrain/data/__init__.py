"""Data sets, and how their samples become batches on the device.

Shapes in this package: N samples, B batch, H height, W width, C channels.
"""
