"""Image data sets, and the way of their samples into batches on the device.

Shapes, in this package: N samples, B batch, H height, W width, C channels.
"""
