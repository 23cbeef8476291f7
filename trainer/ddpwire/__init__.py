"""The names and formats that the programs share: variables, exit codes, metrics, events, files.

All programs import this package, and it imports none of them. It uses only the standard library. ``script`` is the name
by which a script imports ``ddprank.client``.
"""
