"""How samples become a loss: pure functions.

algorithm      a record of the parts; advantages, whitening, losses and the sums that they add up to
"""
