"""How samples become a loss: pure functions.

algorithm       a record of the parts, by name
advantages      from rewards to a number for every token; whitening brings those of a whole step to one scale
policy_losses   from log-probs to the loss of every token; corrections, divergence (KL) and drift beside them, over a batch
losses          all of it together, as sums of a step
"""
