"""How many replicas a role has, changed while the run goes on.

requests     what is asked, how far it is, and what is to be done next: pure; over request, the record of one
scaler       does it; room, whether more replicas fit
routes       over HTTP; ask, from the command line
"""
