"""How samples become a loss: pure functions.

algorithm      a record of the parts; advantages, whitening, losses
"""
