"""The words that ddpctl, ddprun and ddptrain share: variables, exit codes, metrics, files.

Standard library only. All three programs import this package; it imports none of them.
"""
